"""Attention over KV pages with capped logits: one kernel for decode steps and prefill chunks.

`jax.experimental.pallas.ops.gpu.paged_attention` caps logits too, but wants one layer's pages as
[KV heads, pages, page size, D] and one query a row: from a pool [layers, pages, page size, KV
heads, D] that would copy a whole layer's pages at each layer of each step, and prefill would still
need a kernel. This one reads the pool where it lies, for any number of queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from grok1_backend.kernels.gpu.launch import PROGRAMS, launch, load_rows, store_rows
from grok1_backend.kernels.gpu.tiles import LEAST, dot

QUERIES = 64
"""The most queries (of all heads that share a KV head) of a program."""
POSITIONS = 64
"""Positions of context that a program handles at a time."""
LEAST_SPAN = 256
"""Positions of context that are worth a program of their own."""
BEFORE_ANY = -1e30


def attends(queries: jax.Array, pages: jax.Array) -> bool:
    """Whether the kernel takes queries [..., D] and pages of keys or values [..., D]."""
    size = queries.shape[-1]
    return pages.dtype == queries.dtype and size >= LEAST and size & (size - 1) == 0


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    multiplier: float,
    cap: float,
) -> jax.Array:
    """Attention of a step's tokens to all positions up to their own, read from the pages.

    A running softmax (arXiv:2205.14135); where there are few queries, the context is cut into
    spans whose results are joined afterwards, so that one long context fills a GPU.

    Args:
      queries: [B, T, H, D] float.
      keys, values: [layers, pages, page size, KV heads, D], of the same dtype.
      layer: [] int32.
      block_table: [B, W] int32.
      positions: [B, T] int32, ascending along T.
      lengths: [B] int32: how many of the T tokens are real; the others give 0.
      multiplier, cap: logits are cap · tanh(multiplier · (query · key) / cap).

    Returns:
      [B, T, H, D] in the dtype of `queries`.
    """
    batch, length, heads, size = queries.shape
    page_size, kv_heads = keys.shape[2:4]
    group = heads // kv_heads
    tile = max(LEAST, min(QUERIES, 1 << (length * group - 1).bit_length()))
    tiles = -(-length * group // tile)
    context = block_table.shape[1] * page_size
    span = _span(context, batch * kv_heads * tiles)
    splits = -(-context // span)

    def grok1_attention(
        layer_ref: Any,
        queries_ref: Any,
        keys_ref: Any,
        values_ref: Any,
        table_ref: Any,
        positions_ref: Any,
        lengths_ref: Any,
        sums_ref: Any,
        top_ref: Any,
        total_ref: Any,
    ) -> None:
        row, kv_head = pl.program_id(1), pl.program_id(2)
        tile_index, split = pl.program_id(0), pl.program_id(3)
        query = tile_index * tile + jnp.arange(tile)  # counts tokens, and heads within a token
        token, head = query // group, kv_head * group + query % group
        real = (query < length * group) & (token < lengths_ref[row])
        dims = jnp.arange(size)
        x = load_rows(queries_ref, row, token, head, dims, mask=real)
        own = triton.load(positions_ref.at[row, token], mask=real, other=-1)
        layer = layer_ref[0]
        first = split * span
        end = jnp.minimum(first + span, jnp.max(own) + 1)

        def add_block(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, sums = carry
            position = first + i * POSITIONS + jnp.arange(POSITIONS)
            there = position < end
            page = triton.load(table_ref.at[row, position // page_size], mask=there, other=0)

            def read(ref: Any) -> jax.Array:
                place = (layer, page, position % page_size, kv_head, dims)
                return load_rows(ref, *place, mask=there)

            scores = cap * jnp.tanh(dot(x, read(keys_ref).T) * (multiplier / cap))
            seen = position[None, :] <= own[:, None]
            new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, BEFORE_ANY), axis=1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
            decay = jnp.exp(top - new_top)
            part = dot(weights.astype(x.dtype), read(values_ref))
            total = total * decay + jnp.sum(weights, axis=1)
            return new_top, total, sums * decay[:, None] + part

        start = (
            jnp.full((tile,), BEFORE_ANY, jnp.float32),
            jnp.zeros((tile,), jnp.float32),
            jnp.zeros((tile, size), jnp.float32),
        )
        blocks = jnp.maximum(end - first + POSITIONS - 1, 0) // POSITIONS
        top, total, sums = jax.lax.fori_loop(0, blocks, add_block, start)
        written = query < length * group
        store_rows(sums_ref, split, row, token, head, dims, mask=written, value=sums)
        triton.store(top_ref.at[split, row, token, head], top, mask=written)
        triton.store(total_ref.at[split, row, token, head], total, mask=written)

    per_head = jax.ShapeDtypeStruct((splits, batch, length, heads), jnp.float32)
    sums, top, total = launch(
        grok1_attention,
        layer.reshape(1),
        queries,
        keys,
        values,
        block_table,
        positions,
        lengths,
        grid=(tiles, batch, kv_heads, splits),
        out_shape=[
            jax.ShapeDtypeStruct((*per_head.shape, size), jnp.float32),
            per_head,
            per_head,
        ],
        warps=4,
        stages=2,
    )
    return _join(sums, top, total, queries.dtype)


def _join(sums: jax.Array, top: jax.Array, total: jax.Array, dtype: Any) -> jax.Array:
    """Joins the softmax over spans, in one launch.

    Args:
      sums: [splits, B, T, H, D] float32: of values with the weights exp(logit - top).
      top, total: [splits, B, T, H] float32: the largest logit, and the sum of the weights.

    Returns:
      [B, T, H, D] of `dtype`; 0 where nothing was seen.
    """
    splits, batch, length, heads, size = sums.shape
    padded = 1 << (splits - 1).bit_length()

    def grok1_attention_join(sums_ref: Any, top_ref: Any, total_ref: Any, out_ref: Any) -> None:
        place = tuple(pl.program_id(axis) for axis in (1, 2, 0))
        split = jnp.arange(padded)
        there = split < splits
        tops = triton.load(top_ref.at[(split, *place)], mask=there, other=BEFORE_ANY)
        totals = triton.load(total_ref.at[(split, *place)], mask=there, other=0)
        parts = load_rows(sums_ref, split, *place, jnp.arange(size), mask=there)
        decay = jnp.exp(tops - jnp.max(tops))
        whole = jnp.sum(totals * decay)
        out = jnp.sum(parts * decay[:, None], axis=0) / jnp.where(whole > 0, whole, 1)
        out_ref[(*place, slice(None))] = out.astype(dtype)

    out: jax.Array = launch(
        grok1_attention_join,
        sums,
        top,
        total,
        grid=(heads, batch, length),
        out_shape=jax.ShapeDtypeStruct(sums.shape[1:], dtype),
        warps=1,
        stages=1,
    )
    return out


def _span(context: int, programs: int) -> int:
    """Positions of context that one program goes over, whole blocks, to fill a GPU."""
    splits = max(1, min(context // LEAST_SPAN, PROGRAMS // programs))
    return -(-context // (splits * POSITIONS)) * POSITIONS
