"""How the kernels are started: compiled by Triton on a GPU, interpreted in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

INTERPRET = False
"""Runs the kernels' bodies in JAX, on any platform: for tests."""

PROGRAMS = 256
"""How many programs fill a GPU, about two for each of an H100's 132 multiprocessors."""


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int,
    stages: int,
) -> Any:
    """Runs `kernel(*operand refs, *output refs)` once for each point of a grid.

    All refs are whole arrays in the GPU's memory. Of the grid's programs those that differ in the
    first axis run next to each other.

    Args:
      operands: arrays; None stays None.
      out_shape: one `jax.ShapeDtypeStruct`, or a list of them.
    """
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        interpret=INTERPRET,
        # Named, as newer versions of JAX would take their other compiler for GPUs.
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=kernel.__name__,
    )
    return call(*operands)


def load_rows(ref: Any, *place: Any, mask: jax.Array) -> jax.Array:
    """Gathers rows of an array within a kernel.

    Args:
      place: scalars or [rows] int32, along all axes but the last; along that [columns] int32.
      mask: [rows] bool: the others are 0 and not read.

    Returns:
      [rows, columns].
    """
    loaded: jax.Array = triton.load(_rows(ref, place), mask=_wide(mask, place), other=0)
    return loaded


def store_rows(ref: Any, *place: Any, mask: jax.Array, value: jax.Array) -> None:
    """Scatters rows [rows, columns] into an array within a kernel; see `load_rows`."""
    triton.store(_rows(ref, place), value, mask=_wide(mask, place))


def _rows(ref: Any, place: tuple[Any, ...]) -> Any:
    # Indices along all axes: interpreted kernels cannot mix them with slices.
    *leading, columns = place
    index = [axis[:, None] if jnp.ndim(axis) else axis for axis in leading]
    return ref.at[(*index, columns[None, :])]


def _wide(mask: jax.Array, place: tuple[Any, ...]) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (mask.size, place[-1].size))
