"""Loading into stacked, sharded arrays; every fault of a checkpoint found before it begins."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import GOLDEN, golden_config, needs_golden

from grok1_backend.checkpoint import loading
from grok1_backend.checkpoint.arrays import Array, CheckpointError
from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.checkpoint.pickling import write_leaf
from grok1_backend.checkpoint.released import save_parameters
from grok1_backend.model.parameters import leaves
from grok1_backend.model.partition import create_mesh

pytestmark = needs_golden
SCRIPT = Path(__file__).with_name("loading_on_devices.py")


def on_devices(count: int, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def assert_same(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "same" in output


def test_on_meshes_of_8_devices() -> None:
    assert_same(on_devices(8, "one"))


def test_two_processes_read_a_half_each() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    processes = [on_devices(4, "two", port, str(process)) for process in (0, 1)]
    try:
        for process in processes:
            assert_same(process)
    finally:
        for process in processes:
            process.kill()


def test_float_checkpoint(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    named = {
        leaf.name: rng.standard_normal(leaf.shape, np.float32) for leaf in leaves(golden_config())
    }
    save_parameters(tmp_path / "ckpt-0", named)
    loaded = load_parameters(tmp_path, golden_config(), create_mesh())
    for leaf in leaves(golden_config()):
        stack = loaded[leaf.stack]
        assert isinstance(stack, jax.Array)
        found = stack if leaf.layer is None else stack[leaf.layer]
        np.testing.assert_array_equal(found, named[leaf.name])


def test_large_stacks_are_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of a stack owns it, so no second copy of the stack is made."""
    pointers = []
    real = loading._update

    def update(array: jax.Array, piece: jax.Array, first: int) -> jax.Array:
        before = array.unsafe_buffer_pointer()
        updated: jax.Array = real(array, piece, first)
        pointers.append((before, updated.unsafe_buffer_pointer()))
        assert array.is_deleted()
        return updated

    monkeypatch.setattr(loading, "_update", update)
    load_parameters(GOLDEN / "ckpt-0", golden_config(), create_mesh(), run_bytes=1)
    assert len(pointers) == 3 * (12 + 7)  # layers, kinds of leaves, kinds of scales
    assert all(before == after for before, after in pointers)


def test_on_cpu_parameters_stay_where_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy at all: JAX takes over the memory that the files were read into."""
    buffers: set[int] = set()
    real = loading._empty

    def empty(*arguments: Any) -> Array:
        array = real(*arguments)
        buffers.add(array.ctypes.data)
        return array

    monkeypatch.setattr(loading, "_empty", empty)
    loaded = load_parameters(GOLDEN / "ckpt-0", golden_config(), create_mesh())
    assert {array.unsafe_buffer_pointer() for array in jax.tree.leaves(loaded)} == buffers


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of a golden checkpoint, to be broken."""
    path = tmp_path / "ckpt-0"
    shutil.copytree(GOLDEN / "ckpt-0", path, copy_function=shutil.copyfile)
    path.chmod(0o755)
    return path


def rewrite(directory: Path, index: int, weight: Any, scales: Any = None) -> None:
    write_leaf(directory / f"tensor{index:05d}_000", weight, scales)


def bfloat16(*shape: int) -> Any:
    return np.ones(shape, ml_dtypes.bfloat16)


def int8(*shape: int) -> Any:
    return np.ones(shape, np.int8)


# Of the golden checkpoint: 1 is the final norm [32]; 2 an expert weight [8, 32, 176];
# 3 one [8, 176, 32]; 13 a router [32, 8]; 14 is 2 of the next layer.
@pytest.mark.parametrize(
    ("index", "weight", "scales", "expected"),
    [
        (1, np.ones(33, np.float32), None, "language_model/rms_norm/scale: expected float32 [32]"),
        (1, int8(32), bfloat16(1), "expected float32 [32], found int8 [32] with scales"),
        (13, np.ones((8, 32), np.float32), None, "expected float32 [32, 8], found float32 [8, 32]"),
        (
            2,
            int8(8, 32, 175),
            bfloat16(8, 1, 175),
            "expected int8 [8, 32, 176], found int8 [8, 32, 1",
        ),
        (2, np.ones((8, 32, 175), np.float32), None, "expected float32 [8, 32, 176] or int8"),
        (3, int8(8, 176, 32), bfloat16(8, 3, 32), "groups dividing 176, found int8 [8, 176, 32]"),
        (3, int8(8, 176, 32), bfloat16(8, 32), "with scales bfloat16 [8, 'groups', 32]"),
        (3, int8(8, 176, 32), bfloat16(8, 0, 32), "with scales bfloat16 [8, 0, 32]"),
        (
            14,
            np.ones((8, 32, 176), np.float32),
            None,
            "as transformer/decoder_layer_0/moe",
        ),
        (15, int8(8, 176, 32), bfloat16(8, 2, 32), "as transformer/decoder_layer_0/moe"),
    ],
)
def test_wrong_tensor(broken: Path, index: int, weight: Any, scales: Any, expected: str) -> None:
    rewrite(broken, index, weight, scales)
    with pytest.raises(CheckpointError) as raised:
        load_parameters(broken, golden_config(), create_mesh())
    assert f"tensor{index:05d}_000" in str(raised.value)
    assert expected in str(raised.value)


def test_truncated_last_tensor_is_found_before_anything_is_read(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = broken / "tensor00037_000"
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(loading, "_empty", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointError, match=r"tensor00037_000: truncated"):
        load_parameters(broken, golden_config(), create_mesh())


def test_file_that_vanishes_while_loading(broken: Path) -> None:
    """An error in a reading thread ends the load; nothing hangs."""
    path = broken / "tensor00037_000"

    def vanish(*_: int) -> None:
        path.unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match=r"tensor00037_000: No such file"):
        load_parameters(broken, golden_config(), create_mesh(), vanish, run_bytes=1)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        load_parameters(tmp_path, golden_config(), create_mesh())


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        load_parameters(tmp_path / "none", golden_config(), create_mesh())
