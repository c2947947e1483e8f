"""GPUs to lower programs for, where there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, AxisType


@contextlib.contextmanager
def gpus_meant(count: int) -> Iterator[AbstractMesh]:
    """A mesh of H100s, which newer versions of JAX must be told that are meant."""
    shape, names, types = (1, count), ("data", "model"), (AxisType.Auto, AxisType.Auto)
    kinds = getattr(jax.sharding, "AbstractDevice", None)
    if kinds is None:
        yield AbstractMesh(shape, names, types)
        return
    device = kinds(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh(shape, names, types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield mesh
