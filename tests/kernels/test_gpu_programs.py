"""The released model's programs, whole, for 8 GPUs: the host reads no predicate while they run.

Lowered for CUDA, which needs neither a GPU nor CUDA; `benchmarks/gpu_programs.py` compiles the same
ones where CUDA is, and looks at what the compiler made of them.
"""

from __future__ import annotations

import re
from pathlib import Path

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
def lowered() -> dict[str, str]:
    """Of every program its name and StableHLO."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr(choice, "on_gpu", lambda: True)
        patch.setattr(native, "available", lambda _: False)
        import gpu_programs

        with gpus_meant(gpu_programs.GPUS) as mesh:
            traced = [
                (job.name, job.function.trace(*job.arguments))
                for job in gpu_programs.released_programs(mesh)
            ]
            return {
                name: program.lower(lowering_platforms=("cuda",)).as_text()
                for name, program in traced
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
