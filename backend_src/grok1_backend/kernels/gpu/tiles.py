"""Tiles of products with stacked int8 weights: what they can be, and the loop that sums them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grok1_backend.kernels.native import Stack

LEAST = 16
"""Rows, columns and depth of the smallest product of Triton's."""
MOST_ROWS = 128


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, `depth` of its sum at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(rows: int, columns: int, stacks: Sequence[Stack]) -> Tile:
    """The tile for blocks of so many rows.

    Few rows are bound by reading weights: narrow tiles make many programs, deep ones long reads.
    Many rows are bound by arithmetic: the more rows a tile has, the more a converted weight serves.

    Args:
      rows: at most `MOST_ROWS` are taken, and at least `LEAST`; then the next power of two.
      columns: the most wanted.
      stacks: [layers, ..., K, N] each: their columns and groups of scales are whole tiles.
    """
    rows = max(LEAST, min(MOST_ROWS, 1 << (rows - 1).bit_length()))
    width = math.gcd(*(stack.weight.shape[-1] for stack in stacks))
    few = rows <= 32
    return Tile(
        rows=rows,
        columns=_power_of_two(width, columns),
        depth=_power_of_two(_shared_depth(stacks), 128 if few else 64),
        warps=4 if rows < MOST_ROWS else 8,
        stages=4 if few else 3,
    )


def takes(stacks: Sequence[Stack]) -> bool:
    """Whether the kernels can multiply by such weights; JAX does, where not."""
    tile = tile_for(LEAST, LEAST, stacks)
    fits = tile.columns >= LEAST and tile.depth >= LEAST
    # Pallas counts bytes to tell whether 32 bits can address an array, but as if they had no sign.
    addressed = all(
        weight.size <= 2**31 or weight.size * weight.dtype.itemsize > 2**32
        for weight in (stack.weight for stack in stacks)
    )
    return fits and addressed


def _power_of_two(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def _shared_depth(stacks: Sequence[Stack]) -> int:
    """The largest number of rows that divides each stack's groups of rows with common scales."""
    return math.gcd(*(group_rows(stack.weight, stack.scales) for stack in stacks))


def group_rows(weight: Any, scales: Any) -> int:
    """Rows of a weight [..., K, N] that have common scales [..., G, N]."""
    rows: int = weight.shape[-2]
    return rows if scales is None else rows // int(scales.shape[-2])


@dataclass(frozen=True)
class Matrix:
    """Some columns of one matrix of a stack, as a program reads them."""

    weight: Any  # ref [..., K, N]
    scales: Any  # ref [..., G, N], or None
    place: tuple[Any, ...]  # of the matrix in the stack: layer and, if there are some, expert
    columns: Any  # a `pl.ds`

    def read(self, row: Any, rows: int, dtype: Any) -> jax.Array:
        """[rows, columns]."""
        tile: jax.Array = self.weight[(*self.place, pl.ds(row, rows), self.columns)]
        return tile.astype(dtype)

    def scaled(self, sums: jax.Array, row: Any) -> jax.Array:
        """Sums over rows of one group, with that group's scales."""
        if self.scales is None:
            return sums
        group = row // group_rows(self.weight, self.scales)
        scales: jax.Array = self.scales[(*self.place, group, self.columns)]
        return sums * scales.astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[M, K] and [K, N] of one dtype -> [M, N] float32; of float32, exactly."""
    exact = a.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def products_of(
    read: Callable[[Any], jax.Array], matrices: Sequence[Matrix], first: Any, depth: int, tile: Tile
) -> tuple[jax.Array, ...]:
    """Multiplies some columns of x by the matrices' rows from `first` on, x read once for all.

    Args:
      read: the index of a column to `tile.depth` columns of x from there on: [rows, depth] float.
      first: a multiple of `tile.depth`.
      depth: rows to sum over.

    Returns:
      [tile.rows, tile.columns] float32 each.
    """
    zeros = tuple(jnp.zeros((tile.rows, tile.columns), jnp.float32) for _ in matrices)
    segment = math.gcd(depth, *(group_rows(m.weight, m.scales) for m in matrices))

    def add_segment(i: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = first + i * segment

        def add_tile(j: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = start + j * tile.depth
            x = read(row)
            tiles = [matrix.read(row, tile.depth, x.dtype) for matrix in matrices]
            return tuple(total + dot(x, part) for total, part in zip(sums, tiles, strict=True))

        sums = jax.lax.fori_loop(0, segment // tile.depth, add_tile, zeros)
        scaled = [m.scaled(part, start) for m, part in zip(matrices, sums, strict=True)]
        return tuple(total + part for total, part in zip(totals, scaled, strict=True))

    if segment == depth:
        return add_segment(0, zeros)
    totals: tuple[jax.Array, ...] = jax.lax.fori_loop(0, depth // segment, add_segment, zeros)
    return totals
