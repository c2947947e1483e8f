"""Products of the same rows with several weights in one launch: query, key and value together.

The weights stay as they were loaded: laid out interleaved, they would save the same launches and
the same second reading of x, and make loading, and what a shard's part of a tensor is, different
for each platform.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grok1_backend.kernels.gpu.launch import PROGRAMS, launch, load_rows, store_rows
from grok1_backend.kernels.gpu.tiles import MOST_ROWS, Matrix, Tile, products_of, tile_for
from grok1_backend.kernels.native import Stack

LEAST_DEPTH = 512
"""Of a part of the sum that has a program of its own."""


def products(x: jax.Array, stacks: Sequence[Stack]) -> list[jax.Array]:
    """Multiplies [rows, K] float by the same layer of several stacks: [rows, N] float32 each.

    Args:
      stacks: [layers, K, N], that `takes` takes.
    """
    rows, depth = x.shape
    tile = tile_for(rows, 128 if rows > MOST_ROWS else 64, stacks)
    columns = [stack.weight.shape[-1] for stack in stacks]
    tiles = [count // tile.columns for count in columns]
    blocks = -(-rows // tile.rows)
    splits = _splits(depth, blocks * sum(tiles), tile)

    def kernel(layer_ref: Any, x_ref: Any, *refs: Any) -> None:
        block, tile_index, split = (pl.program_id(axis) for axis in range(3))
        row = block * tile.rows + jnp.arange(tile.rows)
        real = row < rows

        def read(column: Any) -> jax.Array:
            return load_rows(x_ref, row, column + jnp.arange(tile.depth), mask=real)

        def multiply(weight: Any, scales: Any, out_ref: Any, column: Any) -> None:
            matrix = Matrix(weight, scales, (layer_ref[0],), pl.ds(column, tile.columns))
            share = depth // splits
            (sums,) = products_of(read, [matrix], split * share, share, tile)
            columns = column + jnp.arange(tile.columns)
            store_rows(out_ref, split, row, columns, mask=real, value=sums)

        weights, outs = refs[: 2 * len(stacks)], refs[2 * len(stacks) :]
        first = 0
        for i, out_ref in enumerate(outs):
            index = tile_index - first
            pl.when((index >= 0) & (index < tiles[i]))(
                functools.partial(
                    multiply, weights[2 * i], weights[2 * i + 1], out_ref, index * tile.columns
                )
            )
            first += tiles[i]

    kernel.__name__ = "grok1_products"
    found: list[jax.Array] = launch(
        kernel,
        stacks[0].layer.reshape(1),
        x,
        *(operand for stack in stacks for operand in (stack.weight, stack.scales)),
        grid=(blocks, sum(tiles), splits),
        out_shape=[jax.ShapeDtypeStruct((splits, rows, n), jnp.float32) for n in columns],
        warps=tile.warps,
        stages=tile.stages,
    )
    return [jnp.sum(parts, axis=0) for parts in found]


def _splits(depth: int, programs: int, tile: Tile) -> int:
    """Into how many parts the sum over `depth` is cut so that few tiles still fill a GPU."""
    splits = 1
    while (
        2 * splits * programs <= PROGRAMS
        and depth % (2 * splits * tile.depth) == 0
        and depth // (2 * splits) >= LEAST_DEPTH
    ):
        splits *= 2
    return splits
