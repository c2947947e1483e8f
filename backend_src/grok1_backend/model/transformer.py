"""The decoder layer, and the whole model as one Haiku function with the released names."""

from __future__ import annotations

import functools

import haiku as hk
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grok1_backend.model.attention import Attend, MultiHeadAttention, attend_causal
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.layers import InOutEmbed, RMSNorm
from grok1_backend.model.moe import Experts, MoELayer, Router, Routing, chosen_experts
from grok1_backend.model.sharding import ModelShards

ONE_SHARD = ModelShards()


class DecoderLayer(hk.Module):
    """Attention and experts, each with a norm before and after, each added to the residual."""

    def __init__(
        self,
        config: GrokConfig,
        dtype: DTypeLike,
        shards: ModelShards = ONE_SHARD,
        experts: Experts = chosen_experts,
        name: str = "decoder_layer",
    ) -> None:
        super().__init__(name=name)
        self.config = config
        self.dtype = dtype
        self.shards = shards
        self.experts = experts

    def __call__(
        self, h: jax.Array, positions: jax.Array, valid: jax.Array, attend: Attend
    ) -> tuple[jax.Array, Routing]:
        """Applies the layer; two all-reduces when sharded.

        Args:
          h: [batch, length, emb_size] float32: the residual stream. Products take their inputs
            in the layer's dtype; what is added up stays float32.
          positions: [batch, length] int32.
          valid: [batch, length] bool: false for padding, which no expert computes.
          attend: see `Attend`.

        Returns:
          The new residual stream, and the routing of the rows [batch · length].
        """
        eps, dtype = self.config.rms_norm_eps, self.dtype
        normed = RMSNorm(eps, "rms_norm")(h).astype(dtype)
        attended = MultiHeadAttention(self.config, self.shards)(normed, positions, attend)
        h = h + RMSNorm(eps, "rms_norm_1")(self.shards.sum(attended))

        rows = RMSNorm(eps, "rms_norm_2")(h).reshape(-1, h.shape[-1])
        routing = Router(self.config)(rows)
        moe = MoELayer(self.config, self.shards, self.experts)
        mixed = self.shards.sum(moe(rows.astype(dtype), routing, valid.reshape(-1)))
        return h + RMSNorm(eps, "rms_norm_3")(mixed.reshape(h.shape)), routing


class Transformer(hk.Module):
    """All layers, one after another, over whole sequences without a cache."""

    def __init__(self, config: GrokConfig, dtype: DTypeLike, experts: Experts) -> None:
        super().__init__(name="transformer")
        self.config = config
        self.dtype = dtype
        self.experts = experts

    def __call__(self, h: jax.Array) -> tuple[jax.Array, list[Routing]]:
        batch, length, _ = h.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        valid = jnp.ones((batch, length), bool)
        attend = functools.partial(attend_causal, config=self.config)
        routings = []
        for i in range(self.config.num_layers):
            name = f"decoder_layer_{i}"
            layer = DecoderLayer(self.config, self.dtype, experts=self.experts, name=name)
            h, routing = layer(h, positions, valid, attend)
            routings.append(routing)
        return h, routings


class LanguageModel(hk.Module):
    """Embedding, final norm and logits; a shard has its part of the vocabulary."""

    def __init__(self, config: GrokConfig, shards: ModelShards = ONE_SHARD) -> None:
        super().__init__(name="language_model")
        self.config = config
        self.shards = shards

    @functools.cached_property
    def _embed(self) -> InOutEmbed:
        config = self.config
        return InOutEmbed(config.vocab_size // self.shards.size, config.emb_size, self.shards)

    # Haiku names what a method creates after the method, but for __call__.
    @hk.name_like("__call__")
    def encode(self, tokens: jax.Array) -> jax.Array:
        """[...] int32 -> the residual stream [..., emb_size] float32."""
        return self._embed(tokens) * self.config.embedding_multiplier_scale

    @hk.name_like("__call__")
    def decode(self, h: jax.Array) -> jax.Array:
        """[rows, emb_size] float32 -> logits [rows, local vocabulary] float32."""
        normed = RMSNorm(self.config.rms_norm_eps, "rms_norm")(h)
        return self._embed.decode(normed) * self.config.output_multiplier_scale


def forward(
    tokens: jax.Array,
    config: GrokConfig,
    dtype: DTypeLike = jnp.float32,
    experts: Experts = chosen_experts,
) -> tuple[jax.Array, list[Routing]]:
    """The whole model over whole sequences: for `hk.transform` (training, names, reference).

    Args:
      tokens: [batch, length] int32.
      dtype: of the inputs of products: float32 or bfloat16.

    Returns:
      Logits [batch, length, vocab_size] float32, and each layer's routing.
    """
    transformer = Transformer(config, dtype, experts)
    model = LanguageModel(config)
    h, routings = transformer(model.encode(tokens))
    logits = model.decode(h.reshape(-1, config.emb_size))
    return logits.reshape(*tokens.shape, config.vocab_size), routings
