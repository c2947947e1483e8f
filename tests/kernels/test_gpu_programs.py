"""The released model's programs, whole, for 8 GPUs: the host reads no predicate while they run.

Lowered for CUDA, which needs neither a GPU nor CUDA; `benchmarks/gpu_programs.py` compiles the same
ones where CUDA is, and looks at what the compiler made of them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from gpus_meant import gpus_meant

from grok1_backend.kernels import choice, native

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

LOOP = re.compile(
    r"stablehlo\.while\(.*\n\s*cond {\n"
    r"\s*(?P<end>%\w+) = stablehlo\.constant dense<(?P<count>\d+)> : tensor<i32>\n"
    r"\s*(?P<more>%\w+) = stablehlo\.compare +LT, %\w+, (?P=end), +SIGNED .*\n"
    r"\s*stablehlo\.return (?P=more) "
)
"""A loop that ends when a counter has reached a constant, and how often that lets it run."""


@pytest.fixture(scope="module")
def gpu_programs() -> Iterator[ModuleType]:
    """The script, while programs are those for GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr(choice, "on_gpu", lambda: True)
        patch.setattr(native, "available", lambda _: False)
        yield importlib.import_module("gpu_programs")


@pytest.fixture(scope="module")
def lowered(gpu_programs: ModuleType) -> dict[str, str]:
    """Of every program its name and StableHLO."""
    with gpus_meant(gpu_programs.GPUS) as mesh:
        return {
            job.name: job.function.trace(*job.arguments)
            .lower(lowering_platforms=("cuda",))
            .as_text()
            for job in gpu_programs.released_programs(mesh)
        }


def test_every_kind_of_program_is_there(lowered: dict[str, str]) -> None:
    kinds = {name.split()[0] for name in lowered}
    assert kinds == {"start", "prefill", "decode", "sample", "score"}
    assert {"sample 32 greedy", "sample 32 plain", "sample 32 full"} <= lowered.keys()


def test_nothing_is_switched_by_the_host(lowered: dict[str, str]) -> None:
    for name, program in lowered.items():
        assert not re.findall(r"stablehlo\.(?:case|if)\b", program), name


def test_every_loop_has_a_length_that_the_compiler_knows(lowered: dict[str, str]) -> None:
    """The layers; and in a program that scores, tiles of 16 positions. Samplers have none."""
    for name, program in lowered.items():
        counts = [int(loop["count"]) for loop in LOOP.finditer(program)]
        kind, size, *_ = name.split()
        tiles = [int(size) // 16] if kind == "score" else []
        layers = [64] if kind in ("prefill", "decode", "score") else []
        assert counts == layers + tiles, name
        assert program.count("stablehlo.while") == len(counts), name


def test_kernels_of_each_program(lowered: dict[str, str]) -> None:
    """Six of a layer; of full sampling the search."""
    launches = {"prefill": 6, "decode": 6, "score": 6, "full": 1}
    for name, program in lowered.items():
        expected = sum(launches.get(word, 0) for word in name.split())
        assert program.count("@__gpu$xla.gpu.triton") == expected, name


def test_the_script_finds_predicates_in_what_was_compiled(gpu_programs: ModuleType) -> None:
    layers = '%a = (s32[]) while(%t), body=%b, backend_config={"known_trip_count":{"n":"64"}}'
    search = "%c = (s32[], s32[8]) while(%t), condition=%d, body=%e"
    branch = "  ROOT %f = f32[8] conditional(%p, %g, %g), true_computation=%h"
    assert gpu_programs.predicates(layers) == 0
    assert gpu_programs.predicates("\n".join((layers, search, branch))) == 2
