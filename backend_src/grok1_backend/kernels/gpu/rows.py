"""Loops that each row of an array ends when it has what it looks for, without the host.

XLA's loop of unknown length, or a condition, has its predicate copied to the host, or is a node of
a CUDA graph where the driver knows such nodes; within a kernel it is a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from grok1_backend.kernels.gpu.launch import launch

BLOCK = 8192
"""Numbers of a row that a program handles at a time, 16 a thread."""

Sum = Callable[[Callable[[jax.Array], jax.Array]], jax.Array]
"""Sums a function of a row's numbers, of [n] numbers at a time, over the row: [] float32.

In one order whatever the function, so that functions >= 0 that grow do not give less."""


def each_row(
    compute: Callable[..., jax.Array], values: jax.Array, wanted: jax.Array, *settings: jax.Array
) -> jax.Array:
    """Computes a number of each wanted row, in a program of its own; others cost nothing.

    Args:
      compute: `(total, *settings of the row)` -> [] float32, where `total` is a `Sum`. Beyond the
        row what is summed is infinity, of which the function must be 0.
      values: [B, n] float32.
      wanted: [B] bool.
      settings: [B] each.

    Returns:
      [B] float32; anything for the rows that are not wanted.
    """
    rows, size = values.shape

    def grok1_each_row(values_ref: Any, wanted_ref: Any, *refs: Any) -> None:
        *setting_refs, out_ref = refs
        row = pl.program_id(0)

        def total(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
            def add_block(i: Any, sums: jax.Array) -> jax.Array:
                place = i * BLOCK + jnp.arange(BLOCK)
                block = triton.load(values_ref.at[row, place], mask=place < size, other=jnp.inf)
                return sums + function(block)

            zeros = jnp.zeros((BLOCK,), jnp.float32)
            return jnp.sum(jax.lax.fori_loop(0, pl.cdiv(size, BLOCK), add_block, zeros))

        def run() -> None:
            out_ref[row] = compute(total, *(ref[row] for ref in setting_refs))

        pl.when(wanted_ref[row] != 0)(run)

    found: jax.Array = launch(
        grok1_each_row,
        values,
        wanted.astype(jnp.int32),
        *settings,
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        warps=16,
        stages=1,
    )
    return found
