"""The embedding table of a running model: its rows for the input, its products for the logits.

It is float32 as released or, where the operator says so, int8 with one scale a row of the
vocabulary. Activations are float32 in either case: nothing but the table is rounded.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from grok1_backend.kernels import choice
from grok1_backend.model.precision import product_precision
from grok1_backend.model.quantization import tile_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """Row v of the table is `weight[v] * scales[v]`. Stands where Haiku expects a parameter."""

    weight: jax.Array  # [V, D] float32 or int8
    scales: jax.Array | None  # [V] float32; None for a float table

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> DTypeLike:
        return self.weight.dtype


def quantize_table(table: jax.Array) -> EmbeddingTable:
    """Rounds a float table [V, D] to int8, each device its own rows; the table is given up.

    The scale of a row is its largest magnitude over 127.
    """

    def quantize(table: jax.Array) -> EmbeddingTable:
        scales = jnp.max(jnp.abs(table), axis=1) / 127
        divisor = jnp.where(scales == 0, 1, scales)[:, None]
        return EmbeddingTable(jnp.round(table / divisor).astype(jnp.int8), scales)

    shardings = None
    if isinstance(table.sharding, NamedSharding):
        rows = NamedSharding(table.sharding.mesh, P(*table.sharding.spec[:1]))
        shardings = EmbeddingTable(table.sharding, rows)  # type: ignore[arg-type]
    quantized: EmbeddingTable = jax.jit(quantize, out_shardings=shardings)(table)
    jax.block_until_ready(quantized)
    table.delete()
    return quantized


def embed(table: jax.Array | EmbeddingTable, ids: jax.Array) -> jax.Array:
    """Rows of the table: [...] int32 -> [..., D] float32."""
    if not isinstance(table, EmbeddingTable):
        return table[ids]
    rows = table.weight[ids].astype(jnp.float32)
    return rows if table.scales is None else rows * table.scales[ids][..., None]


def unembed(x: jax.Array, table: jax.Array | EmbeddingTable) -> jax.Array:
    """The product with each row of the table: [rows, D] float32 -> [rows, V] float32.

    Only an `EmbeddingTable` goes to the native kernel, which has no derivative: what is trained is
    a plain array.
    """
    if not isinstance(table, EmbeddingTable):
        return _product(x, table)
    if table_product := choice.for_table(x.dtype):
        return table_product(x, table.weight, table.scales)
    if table.scales is None:
        return _product(x, table.weight)
    return _quantized_product(x, table.weight) * table.scales


def _product(x: jax.Array, table: jax.Array) -> jax.Array:
    precision = product_precision(x.dtype)
    return jnp.einsum(
        "rd,vd->rv", x, table, precision=precision, preferred_element_type=jnp.float32
    )


def _quantized_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, D] times an int8 table [V, D], of which a tile at a time is converted: [rows, V]."""
    vocabulary, width = weight.shape
    tile = tile_rows(vocabulary, width)

    def product(i: jax.Array | int) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(weight, i * tile, tile).astype(x.dtype)
        # As in `quantization`: on CPU a fused conversion makes the product a scalar loop.
        return _product(x, jax.lax.optimization_barrier(part))

    if tile == vocabulary:
        return product(0)
    parts = jax.lax.map(product, jnp.arange(vocabulary // tile))  # [tiles, rows, tile]
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], vocabulary)
