"""Which kernels compute a model's products, experts and attention: the one place that chooses.

On CPU the native ones, on GPU those in Pallas; where neither takes what is to be computed, the
callers compute the same in JAX. Asked while a function is traced, so choosing costs nothing when
it runs. Kernels are called inside `shard_map`, on a shard's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grok1_backend.kernels import native
from grok1_backend.kernels.native import Stack


class Kernels(Protocol):
    """What there is for each platform; `native` says what arguments and results are."""

    def experts(
        self,
        x: jax.Array,
        chosen: jax.Array,
        gates: jax.Array,
        valid: jax.Array,
        linear: Stack,
        linear_v: Stack,
        linear_1: Stack,
    ) -> jax.Array: ...

    def products(self, x: jax.Array, stacks: Sequence[Stack]) -> list[jax.Array]: ...

    def attention(
        self,
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
    ) -> jax.Array: ...


def on_gpu() -> bool:
    """Whether programs are compiled for GPUs."""
    return jax.default_backend() == "gpu"


def for_weights(dtype: DTypeLike, stacks: Sequence[Stack]) -> Kernels | None:
    """The kernels that multiply activations of a dtype by such weights; None for JAX."""
    if on_gpu():
        from grok1_backend.kernels import gpu  # not on CPU, where its imports take half a second

        return gpu if gpu.takes(stacks) else None
    known = all(stack.weight.dtype in (jnp.int8, jnp.float32) for stack in stacks)
    return native if known and native.available(dtype) else None


def for_table(dtype: DTypeLike) -> Callable[..., jax.Array] | None:
    """`native.table_product` where it takes activations of a dtype; None for JAX, also on GPU."""
    return native.table_product if native.available(dtype) else None


def for_each_row() -> Callable[..., jax.Array] | None:
    """`gpu.each_row` on GPU, where a loop in JAX would have the host wait; None for JAX."""
    if not on_gpu():
        return None
    from grok1_backend.kernels import gpu

    return gpu.each_row


def for_attention(queries: jax.Array, pages: jax.Array) -> Kernels | None:
    """The kernels for attention of queries [..., D] over pages of keys and values [..., D]."""
    if on_gpu():
        from grok1_backend.kernels import gpu

        return gpu if gpu.attends(queries, pages) else None
    return native if pages.dtype == jnp.float32 and native.available(queries.dtype) else None
