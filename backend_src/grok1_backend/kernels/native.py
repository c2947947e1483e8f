"""The kernels as JAX functions. They are called inside `shard_map`, on a shard's own arrays.

Where `available()` is false the callers compute the same in JAX. Weights are stacks over layers
of which the kernels read the chosen layer (and expert) in place.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from grok1_backend.kernels.build import BuildError, find_or_build

log = logging.getLogger(__name__)

SWITCH = "GROK1_NATIVE_KERNELS"
"""Environment variable; `0` leaves the kernels out."""

_HANDLERS = ("Grok1Experts", "Grok1Products", "Grok1Attention", "Grok1TableProduct")


@dataclass(frozen=True)
class Stack:
    """The weights of one kind of all layers, and which layer is meant."""

    weight: jax.Array  # [layers, ..., K, N] int8 or float32
    scales: jax.Array | None  # [layers, ..., G, N] float32 or bfloat16; None for float32 weights
    layer: jax.Array  # [] int32
    blocked: bool = False
    """Whether each matrix is in the order of `to_blocks`."""

    def operands(self) -> tuple[jax.Array, jax.Array]:
        scales = jnp.zeros((0,), jnp.float32) if self.scales is None else self.scales
        return self.weight, scales


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Loads and registers the kernels, building them if need be; None, with a log line, if not."""
    if os.environ.get(SWITCH) == "0":
        log.info("native kernels: left out (%s=0); the model runs on JAX alone", SWITCH)
        return None
    began = time.monotonic()
    try:
        path = find_or_build()
        library = ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        log.warning("native kernels: none, the model runs on JAX alone, slowly: %s", error)
        return None
    for name in _HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    size, flag = ctypes.c_int64, ctypes.c_bool
    library.grok1_takes_blocks.argtypes = (flag, size, size)
    library.grok1_takes_blocks.restype = flag
    library.grok1_to_blocks.argtypes = (ctypes.c_void_p, flag, size, size, size, size)
    log.info("native kernels: %s (%.1f s)", path, time.monotonic() - began)
    return library


def available(dtype: DTypeLike) -> bool:
    """Whether the kernels take activations of a dtype here: float32 on the CPU, if they are built.

    Asked while a function is traced, so the choice costs nothing when it runs.
    """
    on_cpu = jnp.dtype(dtype) == jnp.float32 and jax.default_backend() == "cpu"
    return on_cpu and _library() is not None


def takes_blocks(activations: DTypeLike, weights: DTypeLike, depth: int, groups: int = 1) -> bool:
    """Whether `experts` and `products` are best given weights in blocks here.

    Args:
      activations, weights: their dtypes.
      depth: rows of a matrix.
      groups: of rows that share their scales; 1 without scales.
    """
    if not available(activations):
        return False
    library = _library()
    assert library is not None
    int8 = jnp.dtype(weights) == jnp.int8
    known = int8 or jnp.dtype(weights) == jnp.float32
    return known and bool(library.grok1_takes_blocks(int8, depth, groups))


def to_blocks(matrices: NDArray[Any], groups: int = 1) -> None:
    """Brings matrices in host memory to the order in which the kernels read fastest, in place.

    `kernels/source/blocks.h` says what it is. A matrix stays one run of as many bytes.

    Args:
      matrices: [..., depth, columns] int8 or float32, contiguous, that `takes_blocks`.
      groups: of rows that share their scales.
    """
    assert matrices.flags.c_contiguous
    *lead, depth, columns = matrices.shape
    assert takes_blocks(jnp.float32, matrices.dtype, depth, groups)
    library = _library()
    assert library is not None
    sizes = math.prod(lead), depth, columns, groups
    library.grok1_to_blocks(matrices.ctypes.data, matrices.dtype == np.int8, *sizes)


def counters() -> tuple[int, int]:
    """(Row, expert) pairs computed and bytes of expert weights read since the start."""
    library = _library()
    if library is None:
        raise RuntimeError("the native kernels are not available")
    read = (ctypes.c_int64 * 2)()
    library.grok1_counters(read)
    return read[0], read[1]


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
      x: [rows, emb_size] float32.
      chosen: [rows, selected] int32.
      gates: [rows, selected] float32.
      valid: [rows] bool: other rows cost nothing and give 0.
      linear, linear_v: [layers, experts, emb_size, ffn_size].
      linear_1: [layers, experts, ffn_size, emb_size].

    Returns:
      [rows, emb_size] float32.
    """
    call = jax.ffi.ffi_call("Grok1Experts", _floats(*x.shape))
    stacks = (linear, linear_v, linear_1)
    operands = [operand for stack in stacks for operand in stack.operands()]
    blocked = _all_blocked(stacks)
    out: jax.Array = call(x, chosen, gates, valid, linear.layer, *operands, blocked=blocked)
    return out


def products(x: jax.Array, stacks: Sequence[Stack]) -> list[jax.Array]:
    """Multiplies [rows, K] float32 by the same layer of several stacks: [rows, N] float32 each.

    Args:
      stacks: [layers, K, N].
    """
    columns = [stack.weight.shape[-1] for stack in stacks]
    results = [_floats(x.shape[0], count) for count in columns]
    call = jax.ffi.ffi_call("Grok1Products", results)
    operands = [operand for stack in stacks for operand in stack.operands()]
    return list(call(x, stacks[0].layer, *operands, blocked=_all_blocked(stacks)))


def table_product(x: jax.Array, table: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Multiplies rows by each row of an embedding table.

    Args:
      x: [rows, D] float32.
      table: [V, D] float32, or int8 with scales.
      scales: [V] float32, or None.

    Returns:
      [rows, V] float32.
    """
    call = jax.ffi.ffi_call("Grok1TableProduct", _floats(x.shape[0], table.shape[0]))
    out: jax.Array = call(x, table, jnp.zeros((0,), jnp.float32) if scales is None else scales)
    return out


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

    Args:
      queries: [B, T, H, D] float32.
      keys, values: [layers, pages, page size, KV heads, D] float32.
      layer: [] int32.
      block_table: [B, W] int32.
      positions: [B, T] int32.
      lengths: [B] int32: how many of the T tokens are real; the others give 0.
      multiplier, cap: logits are cap · tanh(multiplier · (query · key) / cap).

    Returns:
      [B, T, H, D] float32.
    """
    call = jax.ffi.ffi_call("Grok1Attention", _floats(*queries.shape))
    out: jax.Array = call(
        queries,
        keys,
        values,
        layer,
        block_table,
        positions,
        lengths,
        multiplier=np.float32(multiplier),
        cap=np.float32(cap),
    )
    return out


def _all_blocked(stacks: Sequence[Stack]) -> bool:
    """The order of weights that one call computes with: it is that of all of them."""
    (blocked,) = {stack.blocked for stack in stacks}
    return blocked


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
