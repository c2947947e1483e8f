"""Who holds what: the mesh, and how each parameter is cut over its `model` axis.

One table of rules gives every parameter a `PartitionSpec`; a parameter that no rule matches is an
error. Where heads or scale groups are fewer than shards they are repeated when loaded, so that
every shard runs the same code on tensors of the same shape.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.sharding import DATA_AXIS, MODEL_AXIS

PARTITION_RULES: tuple[tuple[str, P], ...] = (
    (r"in_out_embed/embeddings$", P(MODEL_AXIS, None)),
    (r"rms_norm(_\d)?/scale$", P(None)),
    (r"router/w$", P(None, None)),
    (r"multi_head_attention/(query|key|value)/w$", P(None, MODEL_AXIS)),
    (r"multi_head_attention/linear/w$", P(MODEL_AXIS, None)),
    (r"moe/linear(_v)?/w$", P(None, None, MODEL_AXIS)),
    (r"moe/linear_1/w$", P(None, MODEL_AXIS, None)),
)
"""Name pattern to the spec of one layer's tensor. The scales of an int8 weight follow it."""


def partition_spec(name: str) -> P:
    """The spec of a leaf, or of one layer of a stack.

    Raises:
      ValueError: no rule matches.
    """
    for pattern, spec in PARTITION_RULES:
        if re.search(pattern, name):
            return spec
    raise ValueError(f"no partition rule for the parameter {name}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a stored tensor is cut over `shards` devices: along one axis, in whole units.

    A unit is what a shard must hold at least one of: a head, a scale group, or one row. Units
    fewer than shards are repeated.
    """

    spec: P
    shape: tuple[int, ...]
    units: int
    shards: int

    @property
    def axis(self) -> int | None:
        """The axis that is cut."""
        return list(self.spec).index(MODEL_AXIS) if MODEL_AXIS in self.spec else None

    def slices(self, shard: int) -> tuple[slice, ...]:
        """The part of the stored tensor that belongs to a shard."""
        cut = [slice(0, size) for size in self.shape]
        if self.axis is not None:
            held = max(1, self.units // self.shards)
            first = shard * self.units // self.shards
            unit = self.shape[self.axis] // self.units
            cut[self.axis] = slice(first * unit, (first + held) * unit)
        return tuple(cut)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the sharded array: the stored shape, repeated units included."""
        shape = [part.stop - part.start for part in self.slices(0)]
        if self.axis is not None:
            shape[self.axis] *= self.shards
        return tuple(shape)


def layout(name: str, shape: tuple[int, ...], config: GrokConfig, shards: int) -> Layout:
    """The layout of a leaf's tensor: a float one, or the int8 weight of a quantised one.

    Raises:
      ValueError: the tensor does not divide over so many shards.
    """
    spec = partition_spec(name)
    return _checked(name, Layout(spec, shape, _units(name, spec, shape, config), shards))


def scales_layout(name: str, shape: tuple[int, ...], config: GrokConfig, shards: int) -> Layout:
    """The layout of the scales [..., groups, N] of a leaf's int8 weight."""
    spec = partition_spec(name)
    by_group = spec[-2] == MODEL_AXIS
    units = shape[-2] if by_group else _units(name, spec, shape, config)
    return _checked(f"{name} (scales)", Layout(spec, shape, units, shards))


def _units(name: str, spec: P, shape: tuple[int, ...], config: GrokConfig) -> int:
    if name.endswith("/query/w"):
        return config.num_q_heads
    if name.endswith(("/key/w", "/value/w")):
        return config.num_kv_heads
    return shape[list(spec).index(MODEL_AXIS)] if MODEL_AXIS in spec else 1


def _checked(name: str, layout: Layout) -> Layout:
    repeatable = name.endswith(("/query/w", "/key/w", "/value/w", "(scales)"))
    divides = layout.units % layout.shards == 0
    repeats = repeatable and layout.shards % layout.units == 0
    if layout.axis is not None and not divides and not repeats:
        raise ValueError(
            f"{name} of shape {list(layout.shape)}: {layout.units} units along axis "
            f"{layout.axis} do not divide over {layout.shards} model shards"
        )
    return layout


def stack_sharding(mesh: Mesh, name: str) -> NamedSharding:
    """The sharding of a stack: as its leaves', whole along the layers."""
    spec = partition_spec(name)
    return NamedSharding(mesh, P(None, *spec) if "/decoder_layer/" in name else spec)


def create_mesh(local: tuple[int, int] = (1, 1), between_hosts: tuple[int, int] = (1, 1)) -> Mesh:
    """A (data, model) mesh over this host's devices, or over several hosts'.

    Args:
      local: devices of one host along (data, model).
      between_hosts: hosts along (data, model).

    Raises:
      ValueError: the devices that there are do not match.
    """
    count = int(np.prod(local) * np.prod(between_hosts))
    if len(jax.devices()) < count:
        raise ValueError(
            f"the mesh {local} x {between_hosts} needs {count} devices, "
            f"{len(jax.devices())} are visible"
        )
    if between_hosts == (1, 1):
        devices = mesh_utils.create_device_mesh(local, jax.devices()[:count])
    else:
        devices = mesh_utils.create_hybrid_device_mesh(
            local, between_hosts, jax.devices(), process_is_granule=True
        )
    return Mesh(devices, (DATA_AXIS, MODEL_AXIS))


def model_shards(mesh: Mesh) -> int:
    """How many devices share one copy of the parameters."""
    return int(mesh.shape[MODEL_AXIS])
