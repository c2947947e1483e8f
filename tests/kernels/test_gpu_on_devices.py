"""The whole step with the kernels for GPUs, interpreted, in `shard_map` over 8 host devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found() -> Any:
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "backend_src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, str(here / "gpu_on_devices.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_logits_are_those_of_jax_alone(found: Any) -> None:
    """Of a prefill and a decode step, in float32."""
    assert max(found["distance"]) < 1e-4


@pytest.mark.parametrize("step", [0, 1], ids=["prefill", "decode"])
def test_everything_large_is_in_kernels(found: Any, step: int) -> None:
    primitives = found["primitives"][step]
    kernels = {name: count for name, count in primitives.items() if name.startswith("grok1_")}
    assert kernels == {
        "grok1_products": 2,  # query, key and value; the output projection
        "grok1_attention": 1,
        "grok1_attention_join": 1,
        "grok1_experts_gated": 1,
        "grok1_experts_down": 1,
    }
    assert primitives["scan"] == 1
