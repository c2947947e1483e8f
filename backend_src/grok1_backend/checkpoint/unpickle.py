"""Finds the arrays in a pickled leaf of the released checkpoint, without unpickling it.

A pickle is a program for a small stack machine. This is such a machine that knows only the
values and the opcodes with which protocol 4 writes a NumPy array or a `QuantizedWeight8bit`:
nothing is imported or called, classes are mere names in a table, and array data is not read,
only located. A pickle that asks for anything else is refused.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from grok1_backend.checkpoint.arrays import (
    BFLOAT16,
    FLOAT32,
    INT8,
    ArrayRef,
    CheckpointError,
    DType,
    LeafRef,
)

_MOST_OPCODES = 1000
"""A quantised leaf takes about 130."""
_LONGEST_TEXT = 256
_MOST_AXES = 8


class UnsafePickleError(CheckpointError):
    """A pickle that asks for more than an array or a `QuantizedWeight8bit`; nothing of it ran."""


class _Class(enum.Enum):
    """The names that a pickle may mention."""

    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"
    BFLOAT16 = "bfloat16"
    QUANTIZED = "QuantizedWeight8bit"


_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"): _Class.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Class.RECONSTRUCT,  # written by NumPy 2
    ("numpy", "ndarray"): _Class.NDARRAY,
    ("numpy", "dtype"): _Class.DTYPE,
    ("ml_dtypes", "bfloat16"): _Class.BFLOAT16,
    ("__main__", "QuantizedWeight8bit"): _Class.QUANTIZED,
}

_DTYPES: dict[object, DType] = {"i1": INT8, "f4": FLOAT32, _Class.BFLOAT16: BFLOAT16}
_DTYPE_TAILS = {INT8: (-1, -1, 0), FLOAT32: (-1, -1, 0), BFLOAT16: (2, 2, 64)}
"""Element size, alignment and flags in a pickled dtype: -1 stands for the built-in ones."""


@dataclass(frozen=True)
class _Span:
    """Bytes of the file."""

    offset: int
    length: int


@dataclass
class _Dtype:
    dtype: DType


@dataclass
class _Array:
    ref: ArrayRef | None = None


@dataclass
class _Quantized:
    fields: dict[str, _Value] = field(default_factory=dict)


class _Mark:
    pass


_Value: TypeAlias = (
    "bool | int | str | tuple[_Value, ...] | dict[str, _Value]"
    " | _Class | _Span | _Dtype | _Array | _Quantized | _Mark | None"
)


def read_leaf(path: Path) -> LeafRef:
    """Locates the arrays of a pickled leaf; reads a few hundred bytes of the file.

    Raises:
      UnsafePickleError: the pickle asks for something that no leaf needs.
      CheckpointError: the file is missing, truncated, longer than its pickle, or no leaf.
    """
    try:
        with path.open("rb") as file:
            return _leaf(_Machine(path, file).run(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _leaf(value: _Value, path: Path) -> LeafRef:
    if isinstance(value, _Array) and value.ref:
        return LeafRef(value.ref)
    if isinstance(value, _Quantized) and set(value.fields) == {"weight", "scales"}:
        weight, scales = value.fields["weight"], value.fields["scales"]
        if isinstance(weight, _Array) and isinstance(scales, _Array) and weight.ref and scales.ref:
            return LeafRef(weight.ref, scales.ref)
    raise CheckpointError(
        f"{path}: expected an array or a QuantizedWeight8bit with the arrays weight and scales, "
        f"found another value ({type(value).__name__.lstrip('_')})"
    )


class _Machine:
    """The stack machine, over one file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = file.seek(0, 2)
        file.seek(0)
        self._stack: list[_Value] = []
        self._memo: dict[int, _Value] = {}

    def run(self) -> _Value:
        if self._take(2) != b"\x80\x04":
            raise CheckpointError(f"{self._path}: expected a pickle of protocol 4, found none")
        for _ in range(_MOST_OPCODES):
            opcode = self._take(1)
            if opcode == b".":
                return self._finish()
            operation = _OPERATIONS.get(opcode)
            if operation is None:
                raise self._refused(f"opcode {opcode!r}")
            operation(self)
        raise self._refused(f"more than {_MOST_OPCODES} opcodes")

    def _finish(self) -> _Value:
        value = self._pop()
        if self._stack:
            raise self._refused("values left on the stack")
        if self._file.tell() != self._size:
            raise CheckpointError(
                f"{self._path}: expected {self._file.tell()} bytes, found {self._size}"
            )
        return value

    def _refused(self, what: str) -> UnsafePickleError:
        return UnsafePickleError(f"{self._path}: refused, since no parameter needs it: {what}")

    # The file.

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise CheckpointError(
                f"{self._path}: truncated: expected more than {self._size} bytes, which is all "
                "the file has"
            )
        return data

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def text(self, length_size: int) -> None:
        length = self._number(length_size)
        if length > _LONGEST_TEXT:
            raise self._refused(f"a text of {length} bytes")
        self._stack.append(self._take(length).decode("utf-8", "replace"))

    def span(self, length_size: int) -> None:
        length = self._number(length_size)
        span = _Span(self._file.tell(), length)
        if span.offset + length > self._size:
            raise CheckpointError(
                f"{self._path}: truncated: expected at least {span.offset + length} bytes, "
                f"found {self._size}"
            )
        self._file.seek(length, 1)
        self._stack.append(span)

    def frame(self) -> None:
        self._take(8)  # frames only say how much to read ahead

    # The stack and the memo.

    def push(self, value: _Value) -> None:
        self._stack.append(value)

    def _pop(self) -> _Value:
        if not self._stack:
            raise self._refused("an opcode without its operands")
        return self._stack.pop()

    def integer(self, size: int, signed: bool = False) -> None:
        self._stack.append(self._number(size, signed=signed))

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple(reversed([self._pop() for _ in range(count)])))

    def _above_mark(self) -> list[_Value]:
        values: list[_Value] = []
        while not isinstance(value := self._pop(), _Mark):
            values.append(value)
        return values[::-1]

    def tuple_above_mark(self) -> None:
        self._stack.append(tuple(self._above_mark()))

    def memoize(self, size: int | None) -> None:
        value = self._pop()
        self._memo[len(self._memo) if size is None else self._number(size)] = value
        self._stack.append(value)

    def recall(self, size: int) -> None:
        index = self._number(size)
        if index not in self._memo:
            raise self._refused(f"value {index} of the memo, which holds none")
        self._stack.append(self._memo[index])

    # Dictionaries, classes and objects.

    def set_items(self, items: list[_Value]) -> None:
        target = self._pop()
        if not isinstance(target, dict) or len(items) % 2:
            raise self._refused("items set on something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise self._refused("a dictionary key that is no text")
            target[key] = value
        self._stack.append(target)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self.set_items([key, value])

    def set_items_above_mark(self) -> None:
        self.set_items(self._above_mark())

    def find_class(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._refused("a class whose name is no text")
        if (module, name) not in _CLASSES:
            raise self._refused(f"{module}.{name}")
        self._stack.append(_CLASSES[module, name])

    def reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if function is _Class.RECONSTRUCT and _is_empty_array(arguments):
            self._stack.append(_Array())
        elif function is _Class.DTYPE:
            self._stack.append(_Dtype(self._dtype(arguments)))
        else:
            raise self._refused("a call")

    def new_object(self) -> None:
        arguments, cls = self._pop(), self._pop()
        if cls is not _Class.QUANTIZED or arguments != ():
            raise self._refused("a new object that is no QuantizedWeight8bit")
        self._stack.append(_Quantized())

    def build(self) -> None:
        state, target = self._pop(), self._pop()
        match target, state:
            case _Dtype(dtype), (3, ("<" | "|"), None, None, None, *tail):
                if tuple(tail) != _DTYPE_TAILS[dtype]:
                    raise self._refused("a dtype with a state of its own")
            case _Array(), (1, tuple() as shape, _Dtype(dtype), bool() as fortran, _Span() as span):
                target.ref = self._array(shape, dtype, fortran, span)
            case _Quantized(), dict():
                target.fields = state
            case _:
                raise self._refused("the state of an object")
        self._stack.append(target)

    def _dtype(self, arguments: _Value) -> DType:
        match arguments:
            case (str() | _Class() as code, False, True) if code in _DTYPES:
                return _DTYPES[code]
            case (str() as code, *_):
                raise self._refused(f"the dtype {code!r} (int8, bfloat16 and float32 are known)")
        raise self._refused("an unknown dtype")

    def _array(
        self, shape: tuple[_Value, ...], dtype: DType, fortran: bool, span: _Span
    ) -> ArrayRef:
        sizes = [size for size in shape if type(size) is int and size >= 0]
        if len(sizes) != len(shape) or len(shape) > _MOST_AXES:
            raise self._refused("an array whose shape is no short list of sizes")
        ref = ArrayRef(self._path, span.offset, tuple(sizes), dtype, fortran)
        if math.prod(sizes) * dtype.itemsize != span.length:
            raise CheckpointError(
                f"{self._path}: expected {ref.nbytes} bytes of {dtype} {ref.shape}, "
                f"found {span.length}"
            )
        return ref


def _is_empty_array(arguments: _Value) -> bool:
    """Whether these are what NumPy passes to `_reconstruct`: ndarray, (0,), b"b"."""
    match arguments:
        case (_Class.NDARRAY, (0,), _Span(length=1)):
            return True
    return False


_OPERATIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x95": _Machine.frame,
    b"(": lambda machine: machine.push(_Mark()),
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b")": lambda machine: machine.push(()),
    b"}": lambda machine: machine.push({}),
    b"K": lambda machine: machine.integer(1),
    b"M": lambda machine: machine.integer(2),
    b"J": lambda machine: machine.integer(4, signed=True),
    b"\x8c": lambda machine: machine.text(1),
    b"X": lambda machine: machine.text(4),
    b"C": lambda machine: machine.span(1),
    b"B": lambda machine: machine.span(4),
    b"\x8e": lambda machine: machine.span(8),
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"t": _Machine.tuple_above_mark,
    b"\x94": lambda machine: machine.memoize(None),
    b"q": lambda machine: machine.memoize(1),
    b"r": lambda machine: machine.memoize(4),
    b"h": lambda machine: machine.recall(1),
    b"j": lambda machine: machine.recall(4),
    b"s": _Machine.set_item,
    b"u": _Machine.set_items_above_mark,
    b"\x93": _Machine.find_class,
    b"R": _Machine.reduce,
    b"\x81": _Machine.new_object,
    b"b": _Machine.build,
}
