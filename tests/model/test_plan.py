"""The plan of a device's memory."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_values import GOLDEN
from test_partition import RELEASED_SCALES
from test_quantization import WIDE, temporary_bytes

from grok1_backend import cli
from grok1_backend.engine.memory_plan import (
    Figure,
    plan_memory,
    released_weights,
    size_pool,
    step_bytes,
)
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.model.config import load_config
from grok1_backend.plan import parse_bytes

GIB = 2**30


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    out, errors = capsys.readouterr()
    return code, out, errors


def test_the_released_model_on_8_devices_of_80_gib(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--config", "grok1-314b", "--devices", "8", "--memory", "80GiB")
    code, out, errors = plan(capsys, *arguments)
    assert (code, errors) == (0, "")
    figures = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "37.06 GiB" in figures["weights"]
    assert "6.40 GiB" in figures["reserve"]
    assert "2.00 MiB" in figures["one page of KV"]
    for name in ("weights", "decode state", "activations", "one page of KV"):
        assert "formula: " in figures[name]
    assert "prefill of 8 x 2048 tokens" in out
    assert "decode of 32 slots" in out
    assert "asked for: 4096 pages = 262144 tokens (8.00 GiB)" in out


@pytest.mark.parametrize("memory", ["80GB", "141GB"])
def test_the_plans_in_the_documentation(capsys: pytest.CaptureFixture[str], memory: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "model.md").read_text()
    arguments = ("--config", "grok1-314b", "--devices", "8", "--memory", memory)
    assert plan(capsys, *arguments)[1] in page


@pytest.mark.parametrize(
    ("devices", "memory", "advice"),
    [
        ("4", "80GiB", ["8 devices", "devices of at least 102.30 GiB"]),
        ("8", "48GiB", ["num_slots of at most 12", "16 devices"]),
    ],
)
def test_what_does_not_fit_says_what_to_change(
    capsys: pytest.CaptureFixture[str], devices: str, memory: str, advice: list[str]
) -> None:
    arguments = ("--config", "grok1-314b", "--devices", devices, "--memory", memory)
    code, out, errors = plan(capsys, *arguments)
    assert code == 1
    assert "left for KV" in out
    for option in advice:
        assert option in errors


@pytest.mark.parametrize(
    ("devices", "memory", "message"),
    [
        ("3", "80GiB", "do not divide over 3 model shards"),
        ("0", "80GiB", "--devices is 0: at least 1"),
        ("8", "80 bananas", "'80 bananas' is no size of a memory"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], devices: str, memory: str, message: str
) -> None:
    arguments = ("--config", "grok1-314b", "--devices", devices, "--memory", memory)
    code, _, errors = plan(capsys, *arguments)
    assert code == 1
    assert message in errors


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("141GB", 141 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3GB", "-1GB", "0", "5 XB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size of a memory"):
        parse_bytes(text)


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16])
def test_advice_is_good_advice(shards: int) -> None:
    """On devices of the size that is said to be enough it fits, and on any smaller it does not."""
    config, settings = load_config("grok1-314b"), RunnerSettings(dtype="bfloat16")
    needed = plan_memory(config, settings, shards, GIB).memory_needed
    assert plan_memory(config, settings, shards, needed + 1).fits
    assert not plan_memory(config, settings, shards, needed - 2**21).fits


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")
@pytest.mark.parametrize("shards", [1, 8])
def test_weights_are_those_of_the_released_checkpoint(shards: int) -> None:
    """The sum over its index of 770 tensors; norms and routers are whole on each device."""
    sharded = whole = 0
    for _, name, shape, _ in json.loads((GOLDEN / "real_314b_index.json").read_text()):
        kind = "/".join(name.split("/")[-3:])
        if scales := RELEASED_SCALES.get(kind):
            sharded += math.prod(shape) + 2 * math.prod(scales)
        elif name.endswith("embeddings"):
            sharded += 4 * math.prod(shape)
        else:
            whole += 4 * math.prod(shape)
    assert released_weights(load_config("grok1-314b"), shards) == sharded // shards + whole


@pytest.mark.usefixtures("jax_only")
@pytest.mark.parametrize(("rows", "tokens"), [(8, 1), (1, 512)])
def test_activations_are_no_less_than_a_compiler_needs(rows: int, tokens: int) -> None:
    """The CPU's, which is not a GPU's: a formula that forgets a large array is found all the same.
    Nor are they many times as much."""
    compiled = temporary_bytes(WIDE, rows, tokens, jnp.float32)
    planned = step_bytes(WIDE, 1, rows, tokens, 4)
    assert compiled <= planned <= 4 * compiled


class TestStartUp:
    """`size_pool`, on a device that tells its memory."""

    config = load_config("tiny")
    settings = RunnerSettings(num_slots=1, decode_rows=(1,), prefill_rows=(1,))

    def sized(self, memory: int, taken: int = 0, **changes: Any) -> RunnerSettings:
        device = SimpleNamespace(
            memory_stats=lambda: {"bytes_limit": memory, "bytes_in_use": taken}
        )
        mesh: Any = SimpleNamespace(local_devices=[device], shape={"model": 1})
        parameters: Any = {"x": jax.device_put(np.zeros(2**20, np.uint8))}
        settings = dataclasses.replace(self.settings, **changes)
        return size_pool(self.config, settings, parameters, mesh)

    def test_the_pool_takes_what_is_left(self) -> None:
        plan = plan_memory(self.config, self.settings, 1, GIB, weights=2**20)
        assert self.sized(GIB).num_pages == plan.pages
        assert plan.parts[0] == Figure("weights", 2**20, "measured: the parameters as loaded")
        left = GIB - sum(part.nbytes for part in plan.parts)
        assert 0 <= left - plan.pages * plan.page.nbytes < plan.page.nbytes

    def test_or_what_is_set(self) -> None:
        assert self.sized(GIB, num_pages=7).num_pages == 7

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="change one of: num_pages of at most"):
            self.sized(GIB, num_pages=10**6)

    def test_memory_that_something_else_holds_is_noticed(self) -> None:
        with pytest.raises(ValueError, match=r"are free on .*: something else holds memory there"):
            self.sized(GIB, taken=GIB // 2)

    def test_a_device_that_does_not_tell(self) -> None:
        device = SimpleNamespace(memory_stats=lambda: None)
        mesh: Any = SimpleNamespace(local_devices=[device])
        assert size_pool(self.config, self.settings, {}, mesh) is self.settings
