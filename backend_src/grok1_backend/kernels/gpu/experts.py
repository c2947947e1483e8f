"""The chosen experts, grouped: blocks of rows of one expert, each expert's weights read in place.

Two launches of one kernel: gate and up projections with what joins them, then down. Which expert
a block belongs to is read by the kernel, so nothing depends on the host, and a block without rows
ends at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from grok1_backend.kernels.gpu.launch import launch, load_rows
from grok1_backend.kernels.gpu.tiles import MOST_ROWS, Matrix, Tile, products_of, tile_for
from grok1_backend.kernels.native import Stack

IN_PLACE_ROWS = 64
"""Up to so many rows every expert has one block of all rows: nothing needs to be sorted."""


@dataclass(frozen=True)
class Blocks:
    """Which rows are computed by which expert; a slot is a place in a block."""

    expert: jax.Array  # [blocks] int32
    row: jax.Array  # [slots] int32; -1 for a slot without one
    slot: jax.Array  # [rows, selected] int32: where a row's pairs are; any slot if not valid


def blocks_in_place(chosen: jax.Array, valid: jax.Array, num_experts: int, size: int) -> Blocks:
    """One block of all rows for each expert, where the rows that did not choose it are empty."""
    rows, selected = chosen.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    experts = jnp.asarray(np.arange(num_experts, dtype=np.int32))
    # Or by or, as a reduction would be a launch of its own.
    uses = functools.reduce(
        jnp.logical_or, (chosen[:, i] == experts[:, None] for i in range(selected))
    )
    table = jnp.where(uses & valid, row, -1)
    table = jnp.pad(table, ((0, 0), (0, size - rows)), constant_values=-1)
    return Blocks(experts, table.reshape(-1), chosen * size + row[:, None])


def blocks_sorted(chosen: jax.Array, valid: jax.Array, num_experts: int, size: int) -> Blocks:
    """The (row, expert) pairs sorted by expert and cut into blocks of one expert."""
    rows, selected = chosen.shape
    pairs = rows * selected
    choice = jnp.where(valid[:, None], chosen, num_experts).reshape(-1)
    order = jnp.argsort(choice, stable=True).astype(jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(choice == experts[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts  # of each expert's pairs in the sorted order
    blocks = (counts + size - 1) // size
    ends = jnp.cumsum(blocks)

    block = jnp.arange(most_blocks(pairs, num_experts, size), dtype=jnp.int32)
    expert = jnp.sum(block[:, None] >= ends, axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)  # of the blocks behind the last one
    first = (block - (ends - blocks)[expert]) * size
    place = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    real = place < counts[expert][:, None]
    pair = order[jnp.where(real, starts[expert][:, None] + place, 0)]
    row = jnp.where(real, pair // selected, -1).reshape(-1)

    slots = jnp.arange(row.size, dtype=jnp.int32)
    # An index out of bounds drops the write.
    target = jnp.where(real, pair, pairs).reshape(-1)
    slot = jnp.zeros((pairs,), jnp.int32).at[target].set(slots, mode="drop")
    return Blocks(expert, row, slot.reshape(rows, selected))


def most_blocks(pairs: int, num_experts: int, size: int) -> int:
    """Blocks that are enough for any choice of experts."""
    return min(pairs, pairs // size + num_experts)


def experts(
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    linear: Stack,
    linear_v: Stack,
    linear_1: Stack,
) -> jax.Array:
    """The sum over a row's chosen experts of gate · linear_1(gelu(linear(x)) · linear_v(x)).

    Args:
      x: [rows, emb_size] float.
      chosen: [rows, selected] int32.
      gates: [rows, selected] float32.
      valid: [rows] bool: other rows cost nothing and give 0.
      linear, linear_v: [layers, experts, emb_size, ffn_size], that `takes` takes, together.
      linear_1: [layers, experts, ffn_size, emb_size], likewise.

    Returns:
      [rows, emb_size] float32.
    """
    rows, selected = chosen.shape
    num_experts = linear.weight.shape[1]
    few = rows <= IN_PLACE_ROWS
    share = rows if few else rows * selected // num_experts
    up_tile = tile_for(share, 64, [linear, linear_v])
    down_tile = tile_for(share, 64 if up_tile.rows < MOST_ROWS else 128, [linear_1])
    place = blocks_in_place if few else blocks_sorted
    blocks = place(chosen, valid, num_experts, up_tile.rows)
    hidden = _launch(x, blocks, [linear, linear_v], up_tile)
    out = _launch(hidden, blocks, [linear_1], down_tile)
    # What no program has written may be anything, even no number.
    parts = jnp.where(valid[:, None, None], out[blocks.slot], 0.0)
    return jnp.sum(parts * gates[..., None], axis=1)


def _launch(x: jax.Array, blocks: Blocks, stacks: Sequence[Stack], tile: Tile) -> jax.Array:
    """Multiplies blocks of rows by the weights of each block's expert.

    Args:
      x: [rows, K] float with two stacks, the gate and what it gates; [slots, K] with one.
      stacks: [layers, experts, K, N] each.

    Returns:
      [slots, N]: of the dtype of x with two stacks, float32 with one. Slots without a row hold
      anything.
    """
    gated = len(stacks) == 2
    depth, columns = stacks[0].weight.shape[-2:]
    dtype = x.dtype if gated else jnp.dtype(jnp.float32)

    def kernel(expert_ref: Any, row_ref: Any, layer_ref: Any, x_ref: Any, *refs: Any) -> None:
        block, column_tile = pl.program_id(0), pl.program_id(1)
        slots = pl.ds(block * tile.rows, tile.rows)
        row = row_ref[slots]

        def compute() -> None:
            source = row if gated else block * tile.rows + jnp.arange(tile.rows)

            def read(column: Any) -> jax.Array:
                return load_rows(x_ref, source, column + jnp.arange(tile.depth), mask=row >= 0)

            *weights, out_ref = refs
            place = layer_ref[0], expert_ref[block]
            own_columns = pl.ds(column_tile * tile.columns, tile.columns)
            matrices = [
                Matrix(weight, scales, place, own_columns)
                for weight, scales in zip(weights[::2], weights[1::2], strict=True)
            ]
            sums = products_of(read, matrices, 0, depth, tile)
            out = jax.nn.gelu(sums[0]) * sums[1] if gated else sums[0]
            out_ref[slots, own_columns] = out.astype(dtype)

        pl.when(jnp.max(row) >= 0)(compute)

    kernel.__name__ = "grok1_experts_gated" if gated else "grok1_experts_down"
    out: jax.Array = launch(
        kernel,
        blocks.expert,
        blocks.row,
        stacks[0].layer.reshape(1),
        x,
        *(operand for stack in stacks for operand in (stack.weight, stack.scales)),
        # The blocks of an expert run next to each other and share its weights in the cache.
        grid=(blocks.expert.size, columns // tile.columns),
        out_shape=jax.ShapeDtypeStruct((blocks.row.size, columns), dtype),
        warps=tile.warps,
        stages=tile.stages,
    )
    return out
