"""Loads a checkpoint into the stacked, sharded arrays that the model runs on.

Every process reads what its own devices hold, and no more than the file's order of bytes makes
necessary. A stack comes in runs of layers of about `RUN_BYTES`: while one run is copied to the
devices the threads read the next, so that beside the parameters themselves the host holds two
runs at a time. On CPU, where JAX takes over suitable host memory as it is, a run is a whole
stack, read straight to where it stays.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from grok1_backend.checkpoint.arrays import Array, ArrayRef, DType, LeafRef
from grok1_backend.checkpoint.checkpoint import open_checkpoint
from grok1_backend.checkpoint.progress import Progress
from grok1_backend.checkpoint.reading import Box, Target, bands, hull, sizes
from grok1_backend.kernels import native
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.embedding import EmbeddingTable, quantize_table
from grok1_backend.model.parameters import EMBEDDING, Leaf, Parameters, leaves
from grok1_backend.model.partition import (
    Layout,
    layout,
    model_shards,
    scales_layout,
    stack_sharding,
)
from grok1_backend.model.quantization import BlockedWeight, QuantizedWeight8bit

RUN_BYTES = 256 * 2**20
_THREADS = 16
_ALIGNMENT = 64
"""Host memory so aligned is taken over by JAX on CPU without a copy."""


def load_parameters(
    path: str | Path,
    config: GrokConfig,
    mesh: Mesh,
    progress: Progress | None = None,
    *,
    int8_embedding: bool = False,
    activations: DTypeLike | None = None,
    run_bytes: int | None = None,
) -> Parameters:
    """Loads a checkpoint of either format onto a mesh.

    Args:
      path: the checkpoint's directory.
      progress: called with the bytes read so far by this process, and all it will read.
      int8_embedding: round the embedding to int8 as soon as it is read.
      activations: the dtype that projections and experts will be multiplied with: they are brought
        to blocks (`native.to_blocks`) where its kernels take them. None: all stay in rows, as JAX
        reads them.
      run_bytes: how much of a stack is in flight at a time, at least one layer; by default
        `RUN_BYTES`, and on CPU all of it.

    Raises:
      CheckpointError: anything wrong with the checkpoint; it is found before memory is taken on
        a device unless a file changes in the meantime, and nothing stays half-loaded.
    """
    stacks = _stacks(open_checkpoint(path, config), config, mesh, activations)
    if run_bytes is None:
        run_bytes = sys.maxsize if mesh.devices.flat[0].platform == "cpu" else RUN_BYTES
    runs = [run for stack in stacks for run in stack.runs(run_bytes)]
    arrays: dict[_Stack, jax.Array] = {}
    table: EmbeddingTable | None = None
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for run, piece in _pieces(runs, pool, progress):
                arrays[run.stack] = run.put_in(arrays.get(run.stack), piece)
                if int8_embedding and run.stack.name == EMBEDDING:
                    del piece
                    table = quantize_table(arrays.pop(run.stack))
        finally:
            pool.shutdown(cancel_futures=True)
    parameters = _parameters(arrays)
    return parameters if table is None else {**parameters, EMBEDDING: table}


@dataclass(frozen=True, eq=False)
class _Stack:
    """The float arrays, the int8 weights or the scales of one kind of leaf, in all layers."""

    name: str
    is_scales: bool
    layers: tuple[ArrayRef, ...]
    stacked: bool
    """Whether the layers are an axis of the array: else there is one, which is the array."""
    layout: Layout
    sharding: NamedSharding
    of_matrices: bool
    """Whether it is what `native.products` and `native.experts` multiply by."""
    block_groups: int | None = None
    """Of rows that share scales, where matrices are brought to blocks; None: they stay in rows."""

    @property
    def dtype(self) -> DType:
        return self.layers[0].dtype

    def shape(self, layers: int) -> tuple[int, ...]:
        """Of so many layers of the sharded array."""
        return (layers, *self.layout.global_shape) if self.stacked else self.layout.global_shape

    @cached_property
    def shard_of_device(self) -> dict[jax.Device, int]:
        """Which part of the tensors each device of this process holds."""
        shape = self.shape(len(self.layers))
        places = self.sharding.addressable_devices_indices_map(shape)
        axis = self.layout.axis
        shards = {}
        for device, index in places.items():
            start = index[axis + self.stacked].start if index and axis is not None else None
            width = self.layout.global_shape[axis or 0] // self.layout.shards
            shards[device] = start // width if start else 0
        return shards

    @cached_property
    def boxes(self) -> dict[int, Box]:
        """The part of a stored tensor that each shard held by this process is."""
        return {shard: self.layout.slices(shard) for shard in set(self.shard_of_device.values())}

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer that this process reads."""
        return math.prod(sizes(hull(list(self.boxes.values())))) * self.dtype.itemsize

    def runs(self, run_bytes: int) -> Iterator[_Run]:
        """Runs of equal length, so that one compiled update serves them all."""
        most = max(1, run_bytes // max(1, self.layer_nbytes))
        layers = len(self.layers)
        count = next(n for n in range(min(most, layers), 0, -1) if layers % n == 0)
        for first in range(0, layers, count):
            yield _Run(self, first, count)


@dataclass(frozen=True, eq=False)
class _Run:
    """Some consecutive layers of a stack: what is read, copied and forgotten at a time."""

    stack: _Stack
    first: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.stack.layer_nbytes

    def start(self, pool: ThreadPoolExecutor) -> tuple[dict[int, Array], list[Future[int]]]:
        """Lets the threads read. Returns a host array [count, ...] for each shard, filled when
        the futures, each of which gives the bytes it read, are done.
        """
        boxes = self.stack.boxes
        buffers = {
            shard: _empty((self.count, *sizes(box)), self.stack.dtype)
            for shard, box in boxes.items()
        }
        futures = []
        for place, ref in enumerate(self.stack.layers[self.first : self.first + self.count]):
            targets = [Target(box, buffers[shard][place]) for shard, box in boxes.items()]
            futures += [pool.submit(band.read) for band in bands(ref, targets)]
        return buffers, futures

    def block(self, pool: ThreadPoolExecutor, buffers: Mapping[int, Array]) -> None:
        """Brings the matrices of the host arrays to blocks, if the stack is to have them."""
        if self.stack.block_groups is not None:
            layers = [layer for buffer in buffers.values() for layer in buffer]
            for _ in pool.map(native.to_blocks, layers, repeat(self.stack.block_groups)):
                pass

    def put(self, buffers: dict[int, Array]) -> jax.Array:
        """Copies the host arrays to the devices; done when it returns."""
        stack = self.stack
        pieces = [
            jax.device_put(buffers[shard] if stack.stacked else buffers[shard][0], device)
            for device, shard in stack.shard_of_device.items()
        ]
        shape = stack.shape(self.count)
        piece = jax.make_array_from_single_device_arrays(shape, stack.sharding, pieces)
        piece.block_until_ready()
        return piece

    def put_in(self, array: jax.Array | None, piece: jax.Array) -> jax.Array:
        """The stack's array with this piece of it: in place, unless the piece is all of it."""
        stack = self.stack
        if self.count == len(stack.layers):
            return piece
        if array is None:
            zeros = partial(jnp.zeros, stack.shape(len(stack.layers)), stack.dtype)
            array = jax.jit(zeros, out_shardings=stack.sharding)()
        updated: jax.Array = _update(array, piece, self.first)
        return updated


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, piece: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, first, axis=0)


def _stacks(
    found: Mapping[str, LeafRef],
    config: GrokConfig,
    mesh: Mesh,
    activations: DTypeLike | None,
) -> list[_Stack]:
    """The arrays that the leaves make up, weights and scales apart."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves(config):
        groups.setdefault(leaf.stack, []).append(leaf)
    stacks = []
    for name, group in groups.items():
        group.sort(key=lambda leaf: leaf.layer or 0)  # by number: 2 before 10
        parts = zip(*(found[leaf.name].arrays for leaf in group), strict=True)
        for is_scales, refs in enumerate(parts):
            lay = (scales_layout if is_scales else layout)(
                name, refs[0].shape, config, model_shards(mesh)
            )
            stacked, sharding = group[0].layer is not None, stack_sharding(mesh, name)
            of_matrices = group[0].quantized and not is_scales
            stacks.append(_Stack(name, bool(is_scales), refs, stacked, lay, sharding, of_matrices))
    return stacks if activations is None else _in_blocks(stacks, activations)


def _in_blocks(stacks: list[_Stack], activations: DTypeLike) -> list[_Stack]:
    """The stacks, all matrices in blocks or none, as the kernels of one step take them."""

    def rows(stack: _Stack) -> int:
        return sizes(stack.layout.slices(0))[-2]

    scale_groups = {stack.name: rows(stack) for stack in stacks if stack.is_scales}
    groups = {stack: scale_groups.get(stack.name, 1) for stack in stacks if stack.of_matrices}
    if not all(
        native.takes_blocks(activations, stack.dtype, rows(stack), count)
        for stack, count in groups.items()
    ):
        return stacks
    return [replace(stack, block_groups=groups.get(stack)) for stack in stacks]


def _pieces(
    runs: Sequence[_Run], pool: ThreadPoolExecutor, progress: Progress | None
) -> Iterator[tuple[_Run, jax.Array]]:
    """Reads the runs in order, each while the one before is copied to the devices."""
    total, done = sum(run.nbytes for run in runs), 0
    following = runs[0].start(pool)
    for place, run in enumerate(runs):
        buffers, futures = following
        for future in futures:
            done += future.result()
            if progress:
                progress(done, total)
        if place + 1 < len(runs):
            following = runs[place + 1].start(pool)
        run.block(pool, buffers)
        piece = run.put(buffers)
        del buffers, futures
        yield run, piece


def _parameters(arrays: Mapping[_Stack, jax.Array]) -> Parameters:
    scales = {stack.name: array for stack, array in arrays.items() if stack.is_scales}
    parameters: Parameters = {}
    for stack, array in arrays.items():
        if stack.is_scales:
            continue
        of = scales.get(stack.name)
        weight = array if of is None else QuantizedWeight8bit(array, of)
        parameters[stack.name] = weight if stack.block_groups is None else BlockedWeight(weight)
    return parameters


def _empty(shape: tuple[int, ...], dtype: DType) -> Array:
    """An array in host memory that JAX on CPU takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
