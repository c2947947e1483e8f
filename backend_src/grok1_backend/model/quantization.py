"""int8 weights as released, and the views by which a scan over layers reads stacked weights.

A weight is int8 `[..., K, N]` with scales `[..., G, N]`: row k of the float weight is
`weight[k] * scales[k // (K / G)]`. Weights stay int8 in memory; a product converts tiles of at
most `TILE_BYTES` and applies the scales to float32 partial sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grok1_backend.kernels import choice, native
from grok1_backend.model.precision import product_precision

TILE_BYTES = 4 * 2**20
"""The largest float copy of a part of an int8 weight that a product makes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight8bit:
    """An int8 weight and its scales."""

    weight: jax.Array  # [..., K, N] int8
    scales: jax.Array  # [..., G, N] float32 or bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that this stands for."""
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> DTypeLike:
        return self.weight.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockedWeight:
    """A weight stacked over layers, its matrices in the order of `native.to_blocks`.

    Only the native kernels read it; its shape is that of the weight that it stands for.
    """

    stored: jax.Array | QuantizedWeight8bit  # [layers, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> DTypeLike:
        return self.stored.dtype


StackedWeight: TypeAlias = jax.Array | QuantizedWeight8bit | BlockedWeight
"""A weight of all layers: [layers, ...]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSlice:
    """One layer of a weight stacked over layers, without copying it out of the stack.

    Stands where Haiku expects a parameter: it has the shape and dtype of one layer's.
    """

    stack: StackedWeight
    layer: jax.Array  # [] int32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.shape[1:])

    @property
    def dtype(self) -> DTypeLike:
        return self.stack.dtype


Weight: TypeAlias = jax.Array | QuantizedWeight8bit | LayerSlice


def value(weight: Weight) -> jax.Array:
    """A small float parameter itself (norm scales, router): never an expert or a projection."""
    stack = weight.stack if isinstance(weight, LayerSlice) else weight
    if isinstance(stack, QuantizedWeight8bit | BlockedWeight):
        kind = type(stack).__name__
        raise TypeError(f"a float array expected, found a {kind} of shape {weight.shape}")
    if isinstance(weight, LayerSlice):
        return jax.lax.dynamic_index_in_dim(stack, weight.layer, keepdims=False)
    return jnp.asarray(stack)


def kernels_and_stacks(
    x: jax.Array, *weights: Weight
) -> tuple[choice.Kernels | None, list[native.Stack]]:
    """The kernels to multiply `x` with, and the weights as they take them; None for JAX.

    Only weights of the stacks go to the kernels: they are what a running model has, and what is
    trained is none, as the kernels have no derivative.
    """
    stacks = []
    for weight in weights:
        if not isinstance(weight, LayerSlice):
            return None, []
        stack, blocked = weight.stack, isinstance(weight.stack, BlockedWeight)
        if isinstance(stack, BlockedWeight):
            stack = stack.stored
        if isinstance(stack, QuantizedWeight8bit):
            stacks.append(native.Stack(stack.weight, stack.scales, weight.layer, blocked))
        else:
            stacks.append(native.Stack(stack, None, weight.layer, blocked))
    return choice.for_weights(x.dtype, stacks), stacks


def products(x: jax.Array, weights: Sequence[Weight]) -> list[jax.Array]:
    """Multiplies [rows, K] float by several weights [K, N] of a layer: [rows, N] float32 each."""
    kernels, stacks = kernels_and_stacks(x, *weights)
    if kernels is not None:
        return kernels.products(x, stacks)
    return [matmul(x, weight) for weight in weights]


def matmul(x: jax.Array, weight: Weight, index: jax.Array | None = None) -> jax.Array:
    """Multiplies by a weight, or by one matrix of a stack of them.

    Args:
      x: [rows, K] float.
      weight: [K, N], or [experts, K, N] with `index`.
      index: [] int32, which expert.

    Returns:
      [rows, N] float32.
    """
    stack: StackedWeight
    prefix: tuple[jax.Array, ...] = () if index is None else (index,)
    if isinstance(weight, LayerSlice):
        stack, prefix = weight.stack, (weight.layer, *prefix)
    else:
        stack = weight
    if isinstance(stack, BlockedWeight):
        raise TypeError(f"a weight of shape {stack.shape} is in blocks: only the kernels read it")
    if isinstance(stack, QuantizedWeight8bit):
        return _quantized_matmul(x, stack, prefix)
    matrix = _slice(stack, prefix, 0, stack.shape[-2])
    return _dot(x, matrix.astype(x.dtype))


def _dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[rows, K] and [K, N] of one dtype -> [rows, N] float32."""
    precision = product_precision(x.dtype)
    return jnp.dot(x, matrix, precision=precision, preferred_element_type=jnp.float32)


def _slice(
    stack: jax.Array, prefix: tuple[jax.Array, ...], row: jax.Array | int, rows: int
) -> jax.Array:
    """Rows `row` to `row + rows` of the matrix that `prefix` picks: [rows, N]."""
    sizes = (1,) * len(prefix) + (rows, stack.shape[-1])
    return jax.lax.dynamic_slice(stack, (*prefix, row, 0), sizes).reshape(sizes[-2:])


def tile_rows(rows: int, columns: int) -> int:
    """The largest divisor of `rows` such that so many float32 rows fit in `TILE_BYTES`."""
    most = max(1, TILE_BYTES // (4 * columns))
    return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


def _quantized_matmul(
    x: jax.Array, stack: QuantizedWeight8bit, prefix: tuple[jax.Array, ...]
) -> jax.Array:
    rows, columns = stack.shape[-2:]
    group = rows // stack.scales.shape[-2]
    tile = tile_rows(group, columns)

    def product(i: jax.Array | int) -> jax.Array:
        weight = _slice(stack.weight, prefix, i * tile, tile).astype(x.dtype)
        # Without the barrier the conversion is fused into the product, which on CPU then runs
        # as a scalar loop, some 20 times slower.
        weight = jax.lax.optimization_barrier(weight)
        part = jax.lax.dynamic_slice_in_dim(x, i * tile, tile, axis=1)
        scales = _slice(stack.scales, prefix, i * tile // group, 1)
        return _dot(part, weight) * scales.astype(jnp.float32)

    if tile == rows:
        return product(0)
    start = jnp.zeros((x.shape[0], columns), jnp.float32)
    total: jax.Array = jax.lax.fori_loop(0, rows // tile, lambda i, sums: sums + product(i), start)
    return total


def quantize(weight: jax.Array, groups: int = 1) -> QuantizedWeight8bit:
    """Rounds a float weight [..., K, N] to int8 with bfloat16 scales [..., groups, N].

    The scale of a group is its largest magnitude over 127, as in the released checkpoint.
    """
    *lead, rows, columns = weight.shape
    grouped = weight.astype(jnp.float32).reshape(*lead, groups, rows // groups, columns)
    scales = (jnp.max(jnp.abs(grouped), axis=-2) / 127).astype(jnp.bfloat16)
    divisor = jnp.where(scales == 0, 1, scales).astype(jnp.float32)[..., None, :]
    quantized = jnp.clip(jnp.round(grouped / divisor), -127, 127).astype(jnp.int8)
    return QuantizedWeight8bit(quantized.reshape(weight.shape), scales)
