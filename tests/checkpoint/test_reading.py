"""Reading boxes of stored arrays, against plain slicing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.checkpoint import reading
from grok1_backend.checkpoint.arrays import Array, ArrayRef, CheckpointError
from grok1_backend.checkpoint.reading import Box, Target, bands, sizes


def stored(path: Path, array: Array, *, fortran: bool = False) -> ArrayRef:
    """Puts an array into a file, 7 bytes from its start."""
    path.write_bytes(b"7 bytes" + array.tobytes(order="F" if fortran else "C") + b"behind")
    return ArrayRef(path, 7, array.shape, array.dtype, fortran)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(slice(start, stop) for start, stop in ends)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
def test_any_boxes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype: Any = data.draw(st.sampled_from([np.int8, np.float32, ml_dtypes.bfloat16]))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    ref = stored(tmp_path_factory.mktemp("array") / "file", array, fortran=data.draw(st.booleans()))
    wanted = data.draw(st.lists(boxes(shape), min_size=1, max_size=3))
    targets = [Target(box, np.full(sizes(box), 99, dtype)) for box in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BAND_BYTES", data.draw(st.sampled_from([4, 16, 100, 10**6])))
        patch.setattr(reading, "_SHORTEST_RUN", data.draw(st.sampled_from([1, 8, 10**6])))
        for band in bands(ref, targets):
            assert band.read() == band.nbytes
    for target in targets:
        np.testing.assert_array_equal(target.array, array[target.box])


def test_only_the_needed_part_of_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows always; columns where their runs are long enough to be worth it."""
    monkeypatch.setattr(reading, "BAND_BYTES", 4096)
    monkeypatch.setattr(reading, "_SHORTEST_RUN", 512)
    array = np.random.default_rng(0).integers(-128, 128, (32, 2048), np.int8)
    ref = stored(tmp_path / "file", array)
    read: list[int] = []
    real = reading._read_into

    def counted(ref: ArrayRef, out: Array, offset: int) -> None:
        read.append(out.nbytes)
        real(ref, out, offset)

    monkeypatch.setattr(reading, "_read_into", counted)
    for box, expected in [
        ((slice(8, 16), slice(0, 2048)), 8 * 2048),
        ((slice(0, 32), slice(1024, 2048)), 32 * 1024),
        ((slice(0, 32), slice(64, 128)), 16 * (2048 + 64)),  # two rows in a band
    ]:
        read.clear()
        target = Target(box, np.empty_like(array[box]))
        for band in bands(ref, [target]):
            band.read()
        np.testing.assert_array_equal(target.array, array[box])
        assert sum(read) == expected
        assert max(read) <= 4096


def test_file_cut_after_it_was_checked(tmp_path: Path) -> None:
    ref = stored(tmp_path / "file", np.zeros(1000, np.int8))
    ref.path.write_bytes(ref.path.read_bytes()[:500])
    (band,) = bands(ref, [Target((slice(0, 1000),), np.empty(1000, np.int8))])
    with pytest.raises(CheckpointError, match="expected at least 1007 bytes, found 500"):
        band.read()


def test_file_gone_after_it_was_checked(tmp_path: Path) -> None:
    ref = stored(tmp_path / "file", np.zeros(10, np.int8))
    ref.path.unlink()
    (band,) = bands(ref, [Target((slice(0, 10),), np.empty(10, np.int8))])
    with pytest.raises(CheckpointError, match="No such file"):
        band.read()
