"""The part of a tensor-parallel group that the code inside `shard_map` sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

MODEL_AXIS = "model"
DATA_AXIS = "data"


@dataclasses.dataclass(frozen=True)
class ModelShards:
    """How many devices share one copy of the parameters, and which one this is.

    With `size` 1 there is no mesh axis and no collective: the same modules then run outside
    `shard_map`.
    """

    size: int = 1

    def index(self) -> jax.Array | int:
        """This device's place among the shards: [] int32, or 0."""
        return jax.lax.axis_index(MODEL_AXIS) if self.size > 1 else 0

    def sum(self, x: jax.Array) -> jax.Array:
        """Adds up the shards' partial sums: one all-reduce."""
        return jax.lax.psum(x, MODEL_AXIS) if self.size > 1 else x

    def local(self, count: int) -> int:
        """How many of `count` heads one shard holds: at least 1, for then they are repeated."""
        return max(1, count // self.size)

    def own_slice(self, x: jax.Array, parts: int) -> jax.Array:
        """This shard's part of the last axis, where `parts` neighbours share one head."""
        if parts == 1:
            return x
        width = x.shape[-1] // parts
        start = jnp.asarray(self.index()) % parts * width
        return jax.lax.dynamic_slice_in_dim(x, start, width, axis=-1)
