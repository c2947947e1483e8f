"""One file in the safetensors format: eight bytes of header length, a JSON header, the arrays.

https://github.com/huggingface/safetensors#format. Written and read here, and not by that
library, since arrays are streamed through a few megabytes of memory and read in parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from grok1_backend.checkpoint.arrays import (
    BFLOAT16,
    FLOAT32,
    INT8,
    ArrayRef,
    CheckpointError,
)

_CODES = {INT8: "I8", BFLOAT16: "BF16", FLOAT32: "F32"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LONGEST_HEADER = 16 * 2**20
_ALIGNMENT = 64


def header(arrays: Mapping[str, ArrayRef]) -> bytes:
    """What precedes the data of these arrays, which follow each other in this order."""
    entries: dict[str, object] = {}
    end = 0
    for name, ref in arrays.items():
        start, end = end, end + ref.nbytes
        entries[name] = {
            "dtype": _CODES[ref.dtype],
            "shape": list(ref.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> dict[str, ArrayRef]:
    """Where the arrays of a file lie.

    Raises:
      CheckpointError: the file is missing, shorter or longer than its header says, or malformed.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: expected a header of {length} bytes, found {size}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        arrays = {name: _array(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is no safetensors header: {error}") from error
    end = 8 + length
    for ref in sorted(arrays.values(), key=lambda ref: ref.offset):
        if ref.offset != end:
            raise CheckpointError(f"{path}: expected data at byte {end}, found it at {ref.offset}")
        end += ref.nbytes
    if end != size:
        raise CheckpointError(f"{path}: expected {end} bytes, found {size}")
    return arrays


def _array(path: Path, base: int, entry: dict[str, object]) -> ArrayRef:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("an entry without shape or data_offsets")
    if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
        raise ValueError("a shape or offset that is no whole number")
    if dtype not in _DTYPES:
        raise ValueError(f"the dtype {dtype!r} (known: {', '.join(_DTYPES)})")
    ref = ArrayRef(path, base + offsets[0], tuple(shape), _DTYPES[str(dtype)])
    if ref.nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"{offsets[1] - offsets[0]} bytes for {ref.dtype} {shape}")
    return ref
