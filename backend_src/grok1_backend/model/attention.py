"""Grouped-query attention with capped logits, over whole sequences and over KV pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from grok1_backend.kernels import choice
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.layers import Linear, rotate
from grok1_backend.model.precision import product_precision
from grok1_backend.model.quantization import products
from grok1_backend.model.sharding import ModelShards

MASKED = -1e30
BLOCK_POSITIONS = 256
"""Positions of context that attention over pages handles at a time."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(queries [B,T,H,D], keys [B,T,K,D], values [B,T,K,D]) -> outputs [B,T,H,D]."""


class MultiHeadAttention(hk.Module):
    """The projections around attention; how keys and values are kept is the caller's (`attend`)."""

    def __init__(self, config: GrokConfig, shards: ModelShards) -> None:
        super().__init__(name="multi_head_attention")
        self.config = config
        self.shards = shards

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """[batch, length, emb_size] float -> the same shape, float32: this shard's partial sum."""
        config, shards = self.config, self.shards
        heads, kv_heads = shards.local(config.num_q_heads), shards.local(config.num_kv_heads)
        batch, length, width = x.shape
        rows = x.reshape(-1, width)

        counts = {"query": heads, "key": kv_heads, "value": kv_heads}
        weights = [
            Linear(count * config.key_size, name).weight(width) for name, count in counts.items()
        ]
        queries, keys, values = (
            projected.reshape(batch, length, -1, config.key_size)
            for projected in products(rows, weights)
        )
        queries = rotate(queries, positions, config.rope_base).astype(x.dtype)
        keys = rotate(keys, positions, config.rope_base).astype(x.dtype)
        values = values.astype(x.dtype)
        outputs = attend(queries, keys, values).reshape(batch * length, -1)
        outputs = shards.own_slice(outputs, max(1, shards.size // config.num_q_heads))
        return Linear(width, "linear")(outputs).reshape(batch, length, width)


def _capped_scores(queries: jax.Array, keys: jax.Array, config: GrokConfig) -> jax.Array:
    """([B,T,K,G,D], [B,C,K,D]) -> logits [B,K,G,T,C] float32."""
    scores = jnp.einsum(
        "btkgd,bckd->bkgtc",
        queries,
        keys,
        precision=product_precision(queries.dtype),
        preferred_element_type=jnp.float32,
    )
    cap = config.attn_logit_cap
    return cap * jnp.tanh(scores * config.attn_output_multiplier / cap)


def _grouped(queries: jax.Array, kv_heads: int) -> jax.Array:
    """[B,T,H,D] -> [B,T,K,H/K,D]: the query heads that share a KV head together."""
    batch, length, heads, size = queries.shape
    return queries.reshape(batch, length, kv_heads, heads // kv_heads, size)


def attend_causal(
    queries: jax.Array, keys: jax.Array, values: jax.Array, config: GrokConfig
) -> jax.Array:
    """Attention of whole sequences to themselves, without a cache (training, reference).

    Args:
      queries: [B, T, H, D] float.
      keys, values: [B, T, K, D] float.

    Returns:
      [B, T, H, D] in the dtype of `queries`.
    """
    length = queries.shape[1]
    scores = _capped_scores(_grouped(queries, keys.shape[2]), keys, config)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(queries.dtype)
    precision = product_precision(queries.dtype)
    outputs = jnp.einsum("bkgtc,bckd->btkgd", weights, values, precision=precision)
    return outputs.reshape(queries.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """The keys and values of all layers, in pages. Donated to each step and given back."""

    keys: jax.Array  # [layers, pages, page size, KV heads, key size]
    values: jax.Array  # the same


@dataclasses.dataclass(frozen=True)
class PagedContext:
    """Where the rows of one step stand: which pages they own and which positions are new."""

    block_table: jax.Array  # [B, W] int32: the pages of a row's context, in order
    positions: jax.Array  # [B, T] int32: of the step's tokens
    lengths: jax.Array  # [B] int32: how many of the T tokens are real

    @property
    def valid(self) -> jax.Array:
        """[B, T] bool: which tokens are real."""
        return jnp.arange(self.positions.shape[1]) < self.lengths[:, None]


def write_pages(
    pool: KVPool, layer: jax.Array, keys: jax.Array, values: jax.Array, context: PagedContext
) -> KVPool:
    """Stores the keys and values [B,T,K,D] of a step's real tokens in one layer of the pool."""
    _, num_pages, page_size, _, _ = pool.keys.shape
    column = jnp.minimum(context.positions // page_size, context.block_table.shape[1] - 1)
    page = jnp.take_along_axis(context.block_table, column, axis=1)
    # An index out of bounds drops the write: that is how padding leaves no trace.
    page = jnp.where(context.valid, page, num_pages)
    where = (layer, page, context.positions % page_size)
    return KVPool(
        keys=pool.keys.at[where].set(keys.astype(pool.keys.dtype), mode="drop"),
        values=pool.values.at[where].set(values.astype(pool.values.dtype), mode="drop"),
    )


def attend_pages(
    queries: jax.Array, pool: KVPool, layer: jax.Array, context: PagedContext, config: GrokConfig
) -> jax.Array:
    """Attention of a step's tokens [B,T,H,D] to all positions up to their own, read from pages.

    Goes over the context in blocks with a running softmax (arXiv:2205.14135), as many as the
    longest row needs. A block that lies behind a row's own position changes nothing of it, to
    the bit, so a row's result does not depend on its neighbours' lengths.
    """
    kernels = choice.for_attention(queries, pool.keys)
    if kernels is not None:
        return kernels.attention(
            queries,
            pool.keys,
            pool.values,
            layer,
            context.block_table,
            context.positions,
            context.lengths,
            multiplier=config.attn_output_multiplier,
            cap=config.attn_logit_cap,
        )
    page_size, kv_heads = pool.keys.shape[2:4]
    batch, length, heads, size = queries.shape
    width = context.block_table.shape[1]
    block_pages = min(max(1, BLOCK_POSITIONS // page_size), width)
    block = block_pages * page_size
    table = jnp.pad(context.block_table, ((0, 0), (0, -width % block_pages)))
    grouped = _grouped(queries, kv_heads)
    last = jnp.where(context.valid, context.positions, 0)
    num_blocks = jnp.max(last) // block + 1

    def read(pages: jax.Array, table_block: jax.Array) -> jax.Array:
        return pages[layer, table_block].reshape(batch, block, kv_heads, size)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, sums = carry
        table_block = jax.lax.dynamic_slice_in_dim(table, i * block_pages, block_pages, axis=1)
        scores = _capped_scores(grouped, read(pool.keys, table_block), config)
        seen = i * block + jnp.arange(block) <= context.positions[..., None]  # [B, T, block]
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "bkgtc,bckd->bkgtd",
            weights.astype(queries.dtype),
            read(pool.values, table_block),
            precision=product_precision(queries.dtype),
            preferred_element_type=jnp.float32,
        )
        total = total * decay + jnp.sum(weights, axis=-1)
        return new_top, total, sums * decay[..., None] + part

    shape = (batch, kv_heads, heads // kv_heads, length)
    start = (
        jnp.full(shape, 2 * MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, size), jnp.float32),
    )
    _, total, sums = jax.lax.fori_loop(0, num_blocks, body, start)
    outputs = jnp.moveaxis(sums / total[..., None], 3, 1)  # [B, T, K, G, D]
    return outputs.reshape(queries.shape).astype(queries.dtype)
