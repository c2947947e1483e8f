"""The safetensors files: as that library reads and writes them, and every fault named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoint_files import read_whole
from safetensors.numpy import save_file

from grok1_backend.checkpoint.arrays import CheckpointError
from grok1_backend.checkpoint.safetensors import header, read_header

ARRAYS: dict[str, Any] = {
    "a/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b/w.weight": np.arange(-3, 4, dtype=np.int8),
    "c": np.ones(1, np.float32),
}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "file", {"some": "metadata"})
    found = read_header(tmp_path / "file")
    assert set(found) == set(ARRAYS)
    for name, ref in found.items():
        assert ref.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(read_whole(ref), ARRAYS[name])


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "theirs")
    refs = read_header(tmp_path / "theirs")
    start = header(refs)
    assert len(start) % 64 == 0
    data = b"".join(read_whole(ref).tobytes() for ref in refs.values())
    (tmp_path / "ours").write_bytes(start + data)
    with safetensors.safe_open(tmp_path / "ours", "numpy") as file:
        assert set(file.keys()) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def written(path: Path, entries: object, data: bytes) -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "I8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_bfloat16(tmp_path: Path) -> None:
    data = np.arange(4).astype(ml_dtypes.bfloat16)
    path = written(tmp_path / "file", {"a": entry("BF16", [2, 2], [0, 8])}, data.tobytes())
    np.testing.assert_array_equal(read_whole(read_header(path)["a"]), data.reshape(2, 2))


@pytest.mark.parametrize(
    ("entries", "data", "why"),
    [
        ({"a": entry()}, b"123", r"expected \d+ bytes, found \d+"),
        ({"a": entry()}, b"12345", r"expected \d+ bytes, found \d+"),
        ({"a": entry(offsets=[1, 5])}, b"12345", "expected data at byte"),
        ({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456", "expected data at byte"),
        ({"a": entry(shape=[5])}, b"1234", "4 bytes for int8"),
        ({"a": entry(shape=[-4])}, b"1234", "whole number"),
        ({"a": entry(shape=[True, 4])}, b"1234", "whole number"),
        ({"a": entry("F64")}, b"1234", "'F64'"),
        ({"a": entry(["I8"])}, b"1234", "header"),
        ({"a": entry(offsets=[0])}, b"1234", "data_offsets"),
        ({"a": {"dtype": "I8"}}, b"1234", "header"),
        ({"a": 3}, b"", "header"),
        ([], b"", "header"),
        (b"{", b"", "header"),
        (b"[" * 100_000, b"", "header"),
        (b"\xff\xfe", b"", "header"),
    ],
)
def test_malformed(tmp_path: Path, entries: object, data: bytes, why: str) -> None:
    path = written(tmp_path / "file", entries, data)
    with pytest.raises(CheckpointError, match=why) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff" * 8, b"\x05" + bytes(7) + b"{}"])
def test_header_longer_than_the_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match="header"):
        read_header(tmp_path / "file")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "none")
