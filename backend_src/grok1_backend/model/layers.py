"""The small Haiku modules: normalisation, projection, tied embedding, rotary positions.

Parameter names are those of the released checkpoint. Inside `shard_map` the parameters are the
local shards, so that sizes here are local ones.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from grok1_backend.model.embedding import EmbeddingTable, embed, unembed
from grok1_backend.model.quantization import Weight, products, value
from grok1_backend.model.sharding import ModelShards


class RMSNorm(hk.Module):
    """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32 (arXiv:1910.07467)."""

    def __init__(self, eps: float, name: str) -> None:
        super().__init__(name=name)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] float -> the same shape and dtype."""
        scale = value(hk.get_parameter("scale", [x.shape[-1]], jnp.float32, init=jnp.zeros))
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class Linear(hk.Module):
    """A projection without bias; float or int8 weights."""

    def __init__(self, output_size: int, name: str) -> None:
        super().__init__(name=name)
        self.output_size = output_size

    def weight(self, input_size: int) -> Weight:
        """[input_size, output_size]."""
        init = hk.initializers.VarianceScaling(1.0)
        shape = [input_size, self.output_size]
        weight: Weight = hk.get_parameter("w", shape, jnp.float32, init=init)
        return weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, K] float -> [rows, output_size] float32."""
        return products(x, [self.weight(x.shape[-1])])[0]


class InOutEmbed(hk.Module):
    """The embedding table, used for the input and, transposed, for the output.

    Sharded on the vocabulary: a shard looks up its own ids and gives the logits of its own ids.
    """

    def __init__(self, local_vocab_size: int, emb_size: int, shards: ModelShards) -> None:
        super().__init__(name="in_out_embed")
        self.shape = (local_vocab_size, emb_size)
        self.shards = shards

    def _table(self) -> jax.Array | EmbeddingTable:
        init = hk.initializers.RandomNormal(1.0)
        table: jax.Array | EmbeddingTable = hk.get_parameter(
            "embeddings", self.shape, jnp.float32, init=init
        )
        return table

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[...] int32 -> [..., emb_size] float32; one all-reduce when sharded."""
        table = self._table()
        if self.shards.size == 1:
            return embed(table, tokens)
        local = tokens - self.shards.index() * self.shape[0]
        mine = (local >= 0) & (local < self.shape[0])
        rows = embed(table, jnp.where(mine, local, 0))
        return self.shards.sum(jnp.where(mine[..., None], rows, 0.0))

    def decode(self, x: jax.Array) -> jax.Array:
        """[rows, emb_size] float32 -> [rows, local vocabulary] float32."""
        return unembed(x, self._table())


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864), the head split in halves.

    Args:
      x: [batch, length, heads, size] float.
      positions: [batch, length] int32.
      base: of the wavelengths.

    Returns:
      The same shape and dtype; computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    phase = positions[..., None, None].astype(jnp.float32) * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
