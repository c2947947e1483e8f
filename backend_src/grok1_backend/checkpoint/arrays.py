"""What every on-disk format comes down to: named leaves whose arrays are byte ranges of files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grok1_backend.errors import UserError

DType: TypeAlias = np.dtype[Any]
Array: TypeAlias = NDArray[Any]

INT8: DType = np.dtype(np.int8)
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT32: DType = np.dtype(np.float32)


class CheckpointError(UserError):
    """A checkpoint that cannot be read. The message names the file, the expected, the found."""


@dataclass(frozen=True)
class ArrayRef:
    """A little-endian array stored as one run of bytes in a file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    fortran: bool = False
    """The first axis varies fastest, as NumPy stores a transposed array."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LeafRef:
    """One leaf of the parameter tree: a float array, or an int8 weight and its scales."""

    weight: ArrayRef
    scales: ArrayRef | None = None

    @property
    def arrays(self) -> tuple[ArrayRef, ...]:
        return (self.weight,) if self.scales is None else (self.weight, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)
