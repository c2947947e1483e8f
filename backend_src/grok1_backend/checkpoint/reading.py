"""Reads parts of stored arrays from disk, by many threads, straight to where they are wanted.

A part is a box: a range along each axis. It is read in bands of some megabytes, each by one call
to the operating system where the box's bytes lie together in the file. Nothing is memory-mapped:
a file that shrinks while it is read is an error here, not a signal that ends the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from grok1_backend.checkpoint.arrays import Array, ArrayRef, CheckpointError, DType

Box: TypeAlias = tuple[slice, ...]
"""A range with both ends along each axis."""

BAND_BYTES = 16 * 2**20
"""The most that one task reads."""
_SHORTEST_RUN = 64 * 1024
"""Shorter runs of wanted bytes are read together with what lies between them."""


@dataclass(frozen=True, eq=False)
class Target:
    """Where a box of a stored array goes."""

    box: Box
    array: Array
    """Of the box's shape and the stored dtype."""


@dataclass(frozen=True, eq=False)
class Band:
    """A part of a stored array small enough for one task, and all the targets of the array."""

    ref: ArrayRef
    shape: tuple[int, ...]  # as stored: the last axis varies fastest
    box: Box
    targets: Sequence[Target]

    @property
    def nbytes(self) -> int:
        """Of the box; the file's bytes between its rows not counted."""
        return math.prod(sizes(self.box)) * self.ref.dtype.itemsize

    def read(self) -> int:
        """Fills the band's part of the targets. Returns `nbytes`.

        Raises:
          CheckpointError: the file cannot be read or is too short.
        """
        dtype, (first, last) = self.ref.dtype, _extent(self.box, self.shape)
        offset = self.ref.offset + first * dtype.itemsize
        count = math.prod(sizes(self.box))
        views = [(common, view) for common, view in map(self._part, self.targets) if view.size]
        if len(views) == 1 and views[0][1].size == count == last - first:
            view = views[0][1]
            if view.flags.c_contiguous:
                _read_into(self.ref, view, offset)
                return self.nbytes
        scratch = np.empty(last - first, dtype)
        _read_into(self.ref, scratch, offset)
        strides = _strides(self.shape, dtype)
        stored: Array = np.ndarray(sizes(self.box), dtype, scratch, strides=strides)
        for common, view in views:
            view[...] = stored[_relative(common, self.box)]
        return self.nbytes

    def _part(self, target: Target) -> tuple[Box, Array]:
        """What the band and a target have in common, and the target's view of it."""
        common = _intersection(self.box, target.box)
        index: tuple[Any, ...] = (*_relative(common, target.box), ...)  # a view, not a scalar
        return common, target.array[index]


def bands(ref: ArrayRef, targets: Sequence[Target]) -> Iterator[Band]:
    """Splits the reading of an array's boxes into tasks; each byte is read once."""
    shape = ref.shape
    if ref.fortran:
        shape = shape[::-1]
        targets = [Target(target.box[::-1], target.array.T) for target in targets]
    for box in _split(hull([target.box for target in targets]), shape, ref.dtype.itemsize):
        yield Band(ref, shape, box, targets)


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds them all."""
    return tuple(
        slice(min(part.start for part in axis), max(part.stop for part in axis))
        for axis in zip(*boxes, strict=True)
    )


def stored_bytes(ref: ArrayRef) -> Iterator[memoryview]:
    """All of an array's bytes, last axis fastest, some megabytes at a time."""
    if ref.fortran:
        whole = np.empty(ref.shape, ref.dtype)
        for band in bands(ref, [Target(tuple(slice(0, size) for size in ref.shape), whole)]):
            band.read()
        data = whole.reshape(-1).view(np.uint8).data
        for start in range(0, ref.nbytes, BAND_BYTES):
            yield data[start : start + BAND_BYTES]
        return
    for start in range(0, ref.nbytes, BAND_BYTES):
        chunk = np.empty(min(BAND_BYTES, ref.nbytes - start), np.uint8)
        _read_into(ref, chunk, ref.offset + start)
        yield chunk.data


def _split(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    count = math.prod(sizes(box))
    first, last = _extent(box, shape)
    together = count == last - first or _run(box, shape) * itemsize < _SHORTEST_RUN
    if count == 0 or (together and (last - first) * itemsize <= BAND_BYTES):
        if count:
            yield box
        return
    axis = next(i for i, size in enumerate(sizes(box)) if size > 1)
    part = box[axis]
    middle = (part.start + part.stop) // 2
    for half in (slice(part.start, middle), slice(middle, part.stop)):
        yield from _split((*box[:axis], half, *box[axis + 1 :]), shape, itemsize)


def sizes(box: Box) -> tuple[int, ...]:
    """Its shape."""
    return tuple(max(0, part.stop - part.start) for part in box)


def _strides(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))


def _extent(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The elements from the box's first to its last, counted from the array's first."""
    first = last = 0
    for part, size in zip(box, shape, strict=True):
        first = first * size + part.start
        last = last * size + part.stop - 1
    return first, last + 1


def _run(box: Box, shape: tuple[int, ...]) -> int:
    """How many elements of the box lie together in the file."""
    run = 1
    for taken, size in zip(reversed(sizes(box)), reversed(shape), strict=True):
        run *= taken
        if taken < size:
            break
    return run


def _intersection(a: Box, b: Box) -> Box:
    return tuple(
        slice(max(x.start, y.start), max(x.start, y.start, min(x.stop, y.stop)))
        for x, y in zip(a, b, strict=True)
    )


def _relative(box: Box, origin: Box) -> Box:
    """The box, counted from the origin's corner."""
    return tuple(
        slice(part.start - base.start, part.stop - base.start)
        for part, base in zip(box, origin, strict=True)
    )


def _read_into(ref: ArrayRef, out: Array, offset: int) -> None:
    data = out.reshape(-1).view(np.uint8).data
    try:
        file = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                count = os.preadv(file, [data[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{ref.path}: expected at least {offset + len(data)} bytes, "
                        f"found {offset + done}"
                    )
                done += count
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{ref.path}: {error.strerror}") from error
