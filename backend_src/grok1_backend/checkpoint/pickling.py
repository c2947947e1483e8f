"""Writes a leaf exactly as the released checkpoint holds it: byte for byte what Python's pickle
makes of it under protocol 4, for the class `__main__.QuantizedWeight8bit` and NumPy 1.

Python's own pickler cannot do it: it would have to find that class in `__main__`, names NumPy's
modules as the installed NumPy does, and copies every array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from grok1_backend.checkpoint.arrays import BFLOAT16, FLOAT32, INT8, Array, DType

_FRAME_TARGET = 64 * 1024
"""Pickle ends a frame at the first object after so many bytes; longer data stands outside."""


@dataclass(frozen=True)
class _Class:
    module: str
    name: str


@dataclass(frozen=True)
class _Made:
    """An object: what makes it, and the state it is then given."""

    opcode: bytes  # R: a call; \x81: a new object
    function: _Class
    arguments: tuple[_Value, ...]
    state: _Value


_Value: TypeAlias = (
    "bool | int | str | bytes | memoryview | tuple[_Value, ...] | dict[str, _Value]"
    " | _Class | _Made | None"
)

_DTYPE = _Class("numpy", "dtype")
_NDARRAY = _Class("numpy", "ndarray")
_RECONSTRUCT = _Class("numpy.core.multiarray", "_reconstruct")
_BFLOAT16 = _Class("ml_dtypes", "bfloat16")
_QUANTIZED = _Class("__main__", "QuantizedWeight8bit")

_DTYPES: dict[DType, _Made] = {
    INT8: _Made(b"R", _DTYPE, ("i1", False, True), (3, "|", None, None, None, -1, -1, 0)),
    FLOAT32: _Made(b"R", _DTYPE, ("f4", False, True), (3, "<", None, None, None, -1, -1, 0)),
    BFLOAT16: _Made(b"R", _DTYPE, (_BFLOAT16, False, True), (3, "<", None, None, None, 2, 2, 64)),
}


def write_leaf(path: Path, weight: Array, scales: Array | None = None) -> None:
    """Writes a leaf: float32, or an int8 weight [..., K, N] and bfloat16 scales [..., G, N].

    Raises:
      TypeError: other dtypes.
    """
    expected = [FLOAT32] if scales is None else [INT8, BFLOAT16]
    found = [array.dtype for array in (weight, scales) if array is not None]
    if found != expected:
        raise TypeError(f"{path.name}: expected {expected}, found {found}")
    leaf = _array(weight)
    if scales is not None:
        leaf = _Made(b"\x81", _QUANTIZED, (), {"weight": leaf, "scales": _array(scales)})
    with path.open("wb") as file:
        _Pickler(file).dump(leaf)


def _array(array: Array) -> _Made:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    state = (1, tuple(array.shape), _DTYPES[array.dtype], False, data)
    return _Made(b"R", _RECONSTRUCT, (_NDARRAY, (0,), b"b"), state)


class _Pickler:
    """Pickle protocol 4, as far as a leaf needs it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = bytearray()
        self._memo: dict[_Value, int] = {}
        self._memo_size = 0

    def dump(self, leaf: _Made) -> None:
        self._file.write(b"\x80\x04")
        self._save(leaf)
        self._frame += b"."
        self._end_frame()

    def _end_frame(self) -> None:
        if len(self._frame) >= 4:  # pickle leaves shorter ones without a header
            self._file.write(b"\x95" + len(self._frame).to_bytes(8, "little"))
        self._file.write(self._frame)
        self._frame.clear()

    def _save(self, value: _Value) -> None:
        if len(self._frame) >= _FRAME_TARGET:
            self._end_frame()
        match value:
            case None:
                self._frame += b"N"
            case bool():
                self._frame += b"\x88" if value else b"\x89"
            case int():
                self._frame += _integer(value)
            case str() | bytes() | _Class():
                self._save_shared(value)
            case memoryview():
                self._save_data(value)
            case tuple():
                self._save_tuple(value)
            case dict():
                self._frame += b"}"
                self._memoize()
                self._frame += b"("
                for key, item in value.items():
                    self._save(key)
                    self._save(item)
                self._frame += b"u"
            case _Made():
                self._save(value.function)
                self._save(value.arguments)
                self._frame += value.opcode
                self._memoize()
                self._save(value.state)
                self._frame += b"b"

    def _memoize(self, value: _Value = None) -> None:
        """Gives the value on the stack the next place in the memo; a `value` can be recalled."""
        if value is not None:
            self._memo[value] = self._memo_size
        self._memo_size += 1
        self._frame += b"\x94"

    def _save_shared(self, value: str | bytes | _Class) -> None:
        """Values of which Python holds one copy: written once, then recalled."""
        if value in self._memo:
            self._frame += b"h" + self._memo[value].to_bytes(1, "little")
            return
        match value:
            case str():
                self._frame += b"\x8c" + _short(value.encode())
            case bytes():
                self._frame += b"C" + _short(value)
            case _Class():
                self._save(value.module)
                self._save(value.name)
                self._frame += b"\x93"
        self._memoize(value)

    def _save_tuple(self, items: Sequence[_Value]) -> None:
        if not items:
            self._frame += b")"
            return
        if len(items) > 3:
            self._frame += b"("
        for item in items:
            self._save(item)
        self._frame += b"t" if len(items) > 3 else b"_\x85\x86\x87"[len(items) :][:1]
        self._memoize()

    def _save_data(self, data: memoryview) -> None:
        if data.nbytes < 2**8:
            header = b"C" + data.nbytes.to_bytes(1, "little")
        elif data.nbytes < 2**32:
            header = b"B" + data.nbytes.to_bytes(4, "little")
        else:
            header = b"\x8e" + data.nbytes.to_bytes(8, "little")
        if data.nbytes < _FRAME_TARGET:
            self._frame += header + data
        else:
            self._end_frame()
            self._file.write(header)
            self._file.write(data)
        self._memoize()


def _short(data: bytes) -> bytes:
    return len(data).to_bytes(1, "little") + data


def _integer(value: int) -> bytes:
    if 0 <= value < 2**8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 2**16:
        return b"M" + value.to_bytes(2, "little")
    return b"J" + value.to_bytes(4, "little", signed=True)
