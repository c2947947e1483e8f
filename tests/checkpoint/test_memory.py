"""How much memory loading takes: the parameters, and a few tensors."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

GIGABYTES = 0.4
TENSOR_BYTES = 8 * 1024 * 5464
"""An expert weight of the benchmark's model: three of these to a layer, and three layers."""


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint_loading.py"
    spec = importlib.util.spec_from_file_location("checkpoint_loading", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "released"
    benchmark.generate(path, benchmark.config_of(GIGABYTES))
    return path


@pytest.mark.parametrize(
    ("devices", "run_bytes", "tensors"),
    [
        (1, None, 1),  # on CPU: read to where it stays
        (1, 1, 4),  # as on a GPU: two layers of a stack on their way, and slack
        (4, None, 5),  # what the threads read, of which each shard takes its columns
    ],
)
def test_peak_of_memory(
    benchmark: ModuleType,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    run_bytes: int | None,
    tensors: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = argparse.Namespace(gigabytes=GIGABYTES, devices=devices, run_bytes=run_bytes)
    loaded = benchmark.in_new_process("load", checkpoint, options)
    assert loaded["parameter_bytes"] > 9 * TENSOR_BYTES
    assert loaded["peak_bytes"] < loaded["parameter_bytes"] + tensors * TENSOR_BYTES
