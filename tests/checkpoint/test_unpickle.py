"""The reader of pickled leaves: exact on the golden files, and deaf to everything else."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import (
    GOLDEN,
    GOLDEN_CHECKPOINTS,
    golden_arrays,
    golden_names,
    needs_golden,
    read_whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.checkpoint.arrays import CheckpointError
from grok1_backend.checkpoint.pickling import write_leaf
from grok1_backend.checkpoint.unpickle import UnsafePickleError, read_leaf

PROTOCOL = b"\x80\x04"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@needs_golden
@pytest.mark.parametrize("checkpoint", GOLDEN_CHECKPOINTS)
def test_golden_values(checkpoint: str) -> None:
    expected = golden_arrays(checkpoint)
    for index, name in enumerate(golden_names(checkpoint)):
        leaf = read_leaf(GOLDEN / checkpoint / f"tensor{index:05d}_000")
        if leaf.scales is None:
            found = {name: leaf.weight}
        else:
            found = {f"{name}.weight": leaf.weight, f"{name}.scales": leaf.scales}
        for key, ref in found.items():
            np.testing.assert_array_equal(
                read_whole(ref).astype(expected[key].dtype), expected[key]
            )


@pytest.mark.parametrize("dtype", [np.int8, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (70000,), (2, 3, 4), (1, 1, 300)])
def test_what_numpy_pickles(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    """Whatever the installed NumPy writes, transposed arrays included, is read."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for index, value in enumerate((array, array.T)):
        path = tmp_path / str(index)
        path.write_bytes(pickle.dumps(value, protocol=4))
        leaf = read_leaf(path)
        assert leaf.scales is None
        assert leaf.weight.dtype == dtype
        np.testing.assert_array_equal(read_whole(leaf.weight), value)


def test_both_spellings_of_numpy(tmp_path: Path) -> None:
    write_leaf(tmp_path / "old", np.arange(3, dtype=np.float32))
    old = (tmp_path / "old").read_bytes()
    new = old.replace(text("numpy.core.multiarray"), text("numpy._core.multiarray"))
    assert new != old
    (tmp_path / "new").write_bytes(new)
    np.testing.assert_array_equal(read_whole(read_leaf(tmp_path / "new").weight), [0, 1, 2])


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def mkdir(mark: str) -> Call:
    return Call(os.mkdir, mark)


def in_array(mark: str, dtype: Any) -> bytes:
    array = np.zeros(1, dtype)
    array[0] = mkdir(mark) if array.dtype == object else (mkdir(mark),)
    return pickle.dumps(array, protocol=4)


def call_by_name(module: bytes, name: bytes, mark: str) -> bytes:
    return module + name + b"\x93" + text(mark) + b"\x85R"


def overwritten_memo(mark: str) -> bytes:
    """Memo 0 is `numpy` to who reads it once, and another module when it is used."""
    swap = text("numpy") + b"q\x00" + text(os.mkdir.__module__) + b"q\x00h\x00"
    return PROTOCOL + call_by_name(swap, text("mkdir"), mark) + b"."


def behind_a_good_value(mark: str) -> bytes:
    """The call's result is thrown away, and a good array left."""
    good = pickle.dumps(np.zeros(2, np.float32), protocol=4)
    module = text(os.mkdir.__module__)
    return PROTOCOL + call_by_name(module, text("mkdir"), mark) + b"0" + good[2:]


def in_quantized_state(mark: str) -> bytes:
    array = pickle.dumps(np.zeros(2, np.int8), protocol=4)[2 + 9 : -1]
    quantized = text("__main__") + text("QuantizedWeight8bit") + b"\x93)\x81}("
    call = call_by_name(text(os.mkdir.__module__), text("mkdir"), mark)
    # The array numbers its memo from 0: it comes first.
    fields = text("weight") + array + text("scales") + call
    return PROTOCOL + quantized + fields + b"ub."


ATTACKS: dict[str, Callable[[str], bytes]] = {
    "call": lambda mark: pickle.dumps(mkdir(mark), protocol=4),
    "os.system": lambda mark: pickle.dumps(Call(os.system, f"mkdir '{mark}'"), protocol=4),
    "builtins.eval": lambda mark: pickle.dumps(
        Call(eval, f"__import__('os').mkdir({mark!r})"), protocol=4
    ),
    "protocol 5": lambda mark: pickle.dumps(mkdir(mark), protocol=5),
    "protocol 0": lambda mark: pickle.dumps(mkdir(mark), protocol=0),
    "protocol 0 posing as 4": lambda mark: PROTOCOL + pickle.dumps(mkdir(mark), protocol=0),
    "INST": lambda mark: PROTOCOL + f"(V{mark}\nios\nmkdir\n.".encode(),
    "OBJ": lambda mark: PROTOCOL + b"(cos\nmkdir\n" + text(mark) + b"o.",
    "dotted name": lambda mark: (
        PROTOCOL + call_by_name(text("os"), text("path.os.mkdir"), mark) + b"."
    ),
    "dotted name of an allowed module": lambda mark: (
        PROTOCOL + call_by_name(text("numpy"), text("testing.sys.modules"), mark) + b"."
    ),
    "object array": lambda mark: in_array(mark, object),
    "dtype with an object field": lambda mark: in_array(mark, [("field", object)]),
    "overwritten memo": overwritten_memo,
    "behind a good value": behind_a_good_value,
    "in the state of a quantised weight": in_quantized_state,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused_and_executes_nothing(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, path = tmp_path / "executed", tmp_path / "pickle"
    path.write_bytes(ATTACKS[attack](str(mark)))
    with pytest.raises(CheckpointError):
        read_leaf(path)
    assert not mark.exists()
    if attack != "dotted name of an allowed module":  # that one calls a dictionary
        # The attack is a real one: Python's own unpickler falls for it.
        monkeypatch.setattr(
            sys.modules["__main__"], "QuantizedWeight8bit", type("Q", (), {}), raising=False
        )
        pickle.loads(path.read_bytes())
        assert mark.exists()


QUANTIZED = text("__main__") + text("QuantizedWeight8bit") + b"\x93"
DTYPE = text("numpy") + text("dtype") + b"\x93"
FLOAT32 = DTYPE + text("f4") + b"\x89\x88\x87R(K\x03"
NDARRAY = text("numpy") + text("ndarray") + b"\x93"
RECONSTRUCT = text("numpy.core.multiarray") + text("_reconstruct") + b"\x93"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (text("os") + text("system") + b"\x93.", "os.system"),
        (text("numpy") + text("frombuffer") + b"\x93.", "numpy.frombuffer"),
        (text("numpy") + text("ndarray.__class__") + b"\x93.", "ndarray.__class__"),
        (b"K\x01K\x02\x93.", "name is no text"),
        (QUANTIZED + b")R.", "a call"),
        (NDARRAY + b"K\x00\x85\x85R.", "a call"),
        (RECONSTRUCT + QUANTIZED + b"K\x00\x85C\x01b\x87R.", "a call"),
        (RECONSTRUCT + NDARRAY + b"J\xff\xff\xff\x7f\x85C\x01b\x87R.", "a call"),
        (NDARRAY + b")\x81.", "new object"),
        (QUANTIZED + b"K\x01\x85\x81.", "new object"),
        (QUANTIZED + b")}\x92.", "opcode"),
        (QUANTIZED + b")\x81NNN\x86b.", "state"),
        (DTYPE + text("O") + b"\x89\x88\x87R.", "the dtype 'O'"),
        (DTYPE + text("V8") + b"\x89\x88\x87R.", "the dtype 'V8'"),
        (DTYPE + text("i1,O") + b"\x89\x88\x87R.", "the dtype 'i1,O'"),
        (DTYPE + text("f8") + b"\x89\x88\x87R.", "the dtype 'f8'"),
        (
            DTYPE
            + text("f4")
            + b"\x89\x88\x87R(K\x03"
            + text(">")
            + b"NNN"
            + b"K\x01" * 3
            + b"tb.",
            "",
        ),
        (
            DTYPE
            + text("f4")
            + b"\x89\x88\x87R(K\x03"
            + text("<")
            + b"N)}"
            + b"K\x01" * 3
            + b"tb.",
            "",
        ),
        (b"h\x07.", "memo"),
        (b"Pid\n.", "opcode"),
        (b"K\x01Q.", "opcode"),
        (b"\x82\x01.", "opcode"),
        (b"I1\n.", "opcode"),
        (b"\x8a\xff" + b"\xff" * 255 + b".", "opcode"),
        (b".", "operands"),
        (b"\x85.", "operands"),
        (b"t.", "operands"),
        (b"NN.", "left on the stack"),
        (b"}(NNu.", "key"),
        (b"}(" + text("a") + b"u.", "items"),
        (b")(" + text("a") + b"Nu.", "items"),
        (b"N" + b"\x85" * 5000 + b".", "1000 opcodes"),
        (b"X\xff\xff\xff\x7f", "a text of"),
    ],
)
def test_refused(tmp_path: Path, body: bytes, why: str) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(PROTOCOL + body)
    with pytest.raises(UnsafePickleError) as raised:
        read_leaf(path)
    assert str(path) in str(raised.value)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"N.", "expected an array"),
        (QUANTIZED + b")\x81.", "expected an array"),
        (QUANTIZED + b")\x81}" + text("weight") + b"Nsb.", "expected an array"),
        (b"\x8e" + b"\xff" * 7 + b"\x7f", "truncated"),
        (b"N.N.", "found 6"),
    ],
)
def test_no_leaf(tmp_path: Path, body: bytes, why: str) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(PROTOCOL + body)
    with pytest.raises(CheckpointError, match=why) as raised:
        read_leaf(path)
    assert str(path) in str(raised.value)


def good_leaf(tmp_path: Path) -> bytes:
    scales = np.ones((1, 4), ml_dtypes.bfloat16)
    write_leaf(tmp_path / "good", np.ones((300, 4), np.int8), scales)
    return (tmp_path / "good").read_bytes()


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = good_leaf(tmp_path)
    read_leaf(tmp_path / "good")
    path = tmp_path / "cut"
    for size in (*range(220), *range(220, 1380, 50), *range(1380, len(data))):  # all of no array
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_leaf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_leaf(tmp_path / "none")


def test_array_larger_than_its_data(tmp_path: Path) -> None:
    data = good_leaf(tmp_path).replace(b"M\x2c\x01K\x04\x86", b"M\x2d\x01K\x04\x86")
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"expected 1204 bytes of int8 \(301, 4\), found 1200"
    ):
        read_leaf(tmp_path / "bad")


@settings(derandomize=True, deadline=None, max_examples=400)
@given(data=st.data())
def test_damage_never_escapes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever bytes change, the result is a CheckpointError or arrays inside the file."""
    folder = tmp_path_factory.mktemp("damage")
    good = bytearray(good_leaf(folder))
    header = [i for i in range(len(good)) if not 200 <= i < 1400]
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.sampled_from(header))] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(good)
    try:
        leaf = read_leaf(path)
    except CheckpointError:
        return
    for ref in leaf.arrays:
        assert 0 <= ref.offset <= ref.offset + ref.nbytes <= len(good)


def test_good_pickle_is_one_to_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original code unpickles what we write."""
    quantized = type("QuantizedWeight8bit", (), {})
    monkeypatch.setattr(sys.modules["__main__"], "QuantizedWeight8bit", quantized, raising=False)
    leaf = pickle.load(io.BytesIO(good_leaf(tmp_path)))
    assert type(leaf) is quantized
    assert leaf.weight.dtype == np.int8
    assert leaf.weight.shape == (300, 4)
    assert leaf.scales.dtype == ml_dtypes.bfloat16
