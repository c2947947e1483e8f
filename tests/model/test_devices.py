"""One model over many devices: the same tokens, few collectives, no copies of weights.

Everything on 8 host devices is computed by one process (`on_devices.py`), of which each test looks
at a part.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_values import GOLDEN

from grok1_backend.model.config import load_config

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")


def start(devices: int, *arguments: str) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "backend_src"), str(here), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        [sys.executable, str(here / "on_devices.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    try:
        out, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    return finish(start(8, "one"))


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "8x1"])
def test_every_mesh_gives_the_tokens_of_one_device(found: Any, mesh: str) -> None:
    """8 prompts at once; 2 KV heads and 4 query heads, so that some meshes repeat them."""
    assert found["tokens"][mesh] == found["tokens"]["1x1"]
    assert np.array(found["tokens"]["1x1"]).shape == (8, 8)


def test_one_device_gives_the_tokens_of_the_reference(found: Any) -> None:
    golden = np.load(GOLDEN / "golden_q8_fp32.npz")
    for row, case in enumerate(("len1", "len5", "len17", "len31", "padded")):
        tokens = [step[row] for step in found["tokens"]["1x1"]]
        assert tokens == golden[f"{case}/greedy_tokens"][: len(tokens)].tolist()


@pytest.mark.parametrize("shards", ["2", "4", "8"])
def test_eight_groups_of_scales_on_any_number_of_shards(found: Any, shards: str) -> None:
    """Float32 sums in another order: 1e-4 as everywhere, measured 1e-6."""
    assert found["groups"][shards] < 1e-4


@pytest.mark.parametrize("shards", ["2", "8"])
def test_an_int8_embedding_on_any_number_of_shards(found: Any, shards: str) -> None:
    """Each shard rounds its own rows, which no other has any part in."""
    assert found["int8 embedding"][shards] < 1e-4


def test_collectives_of_a_decode_step(found: Any) -> None:
    """One all-reduce for the embedding; two in the loop over layers; one gather to sample."""
    decode = dict(found["decode"])
    assert decode.pop("entry") == {"all-reduce": 1}
    assert list(decode.values()) == [{"all-reduce": 2}]
    assert found["sample"] == {"entry": {"all-gather": 1}}


def test_a_step_takes_few_arguments(found: Any) -> None:
    """Each argument costs time on each device at every call."""
    assert found["arguments"] <= 60


@pytest.mark.parametrize("step", ["decode 32", "prefill 32"])
def test_no_copy_of_weights_at_the_released_sizes(found: Any, step: str) -> None:
    """A copy of one matrix of one expert would take 50 MB on each of 8 devices."""
    config = load_config("grok1-314b")
    copy = config.emb_size * config.ffn_size // 8 * 2
    assert found["temporary"][step] < copy


def test_a_mesh_over_two_hosts_is_refused_in_one(found: Any) -> None:
    assert "must equal the product of dcn_mesh_shape" in found["hybrid mesh"]


def test_two_processes_give_the_tokens_of_the_reference() -> None:
    """4 devices each, joined by gloo; the mesh's `model` axis goes over both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [start(4, "two", port, str(i)) for i in range(2)]
    golden = np.load(GOLDEN / "golden_q8_fp32.npz")
    for result in [finish(process) for process in processes]:
        assert result["mesh"] == [[0, 0, 0, 0, 1, 1, 1, 1]]
        for case, tokens in result["tokens"].items():
            assert tokens == golden[f"{case}/greedy_tokens"].tolist()
