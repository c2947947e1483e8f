"""Native kernels against the same steps in JAX alone, and against what the machine can do.

Whole forward steps of the model that other engines are compared with (4 layers, width 1024, 8
experts of which 2 are used, vocabulary 32768), without the sampler. Each figure is a median of
interleaved runs. `floor` is the time to read the bytes that the step must read at the bandwidth
measured here, or the time of its arithmetic at the rate of a large float32 product, whichever is
longer. Run: `python benchmarks/kernels.py [--rounds N] [--weights int8|float32]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from bench_model import CONFIG, WEIGHTS, write_model
from floor import needs

from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.kernels import native
from grok1_backend.model import steps
from grok1_backend.model.parameters import Parameters
from grok1_backend.model.partition import create_mesh

PAGE_SIZE = 64
Step = Callable[[], Any]


def make_step(parameters: Parameters, rows: int, tokens: int, start: int) -> Step:
    """A compiled step of `rows` requests, each `tokens` new tokens after `start` others."""
    mesh = create_mesh((1, 1))
    step = steps.on_mesh(
        steps.last_logits,
        parameters,
        mesh,
        CONFIG,
        jnp.float32,
        (steps.STEP_INPUT_SPECS,),
        (steps.LOGITS_SPEC, steps.POOL_SPECS),
    )
    pages = -(-(start + tokens) // PAGE_SIZE)
    pools = [steps.pool_creator(CONFIG, mesh, pages * rows, PAGE_SIZE, jnp.float32)()]
    rng = np.random.default_rng(1)
    given = steps.StepInput(
        rng.integers(3, CONFIG.vocab_size, (rows, tokens), np.int32),
        np.full(rows, start, np.int32),
        np.full(rows, tokens, np.int32),
        np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
    )
    compiled = jax.jit(step, donate_argnums=1).lower(parameters, pools[0], given).compile()

    def run() -> None:
        logits, pools[0] = compiled(parameters, pools[0], given)
        jax.block_until_ready(logits)

    return run


def seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def machine() -> tuple[float, float]:
    """Bytes/s of a vector times a large float32 matrix; FLOP/s of a large float32 product."""
    matrix = jnp.ones((32768, 1024))
    read = jax.jit(partial(jnp.einsum, "d,vd->v"))
    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.dot)
    jobs: list[Step] = [
        lambda: read(matrix[0], matrix).block_until_ready(),
        lambda: product(square, square).block_until_ready(),
    ]
    best = [min(seconds(job) for _ in range(8)) for job in jobs]
    return matrix.nbytes / best[0], 2 * 2048**3 / best[1]


CASES = {
    "decode, 1 request": (1, 1, 128),
    "decode, 8 requests": (8, 1, 128),
    "decode, 32 requests": (32, 1, 128),
    "decode, 1 request at 8000": (1, 1, 8000),
    "prefill 64": (1, 64, 0),
    "prefill 512": (1, 512, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights", choices=WEIGHTS, default="int8")
    parser.add_argument("--cases", default="", help="part of the names of the cases to run")
    parser.add_argument("--alone", action="store_true", help="leave out the steps in JAX alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), options.weights)
        load = partial(load_parameters, model, CONFIG, create_mesh((1, 1)))
        parameters, in_rows = load(activations=jnp.float32), load()
    print(f"{options.weights} weights, {native.available(jnp.float32)=}")
    print("step                        tokens/s   ms      floor   of floor   in JAX alone")
    for name, (rows, tokens, start) in CASES.items():
        if options.cases not in name:
            continue
        ours = make_step(parameters, rows, tokens, start)
        contenders = [ours]
        if not options.alone:
            with mock.patch.object(native, "available", return_value=False):
                contenders.append(make_step(in_rows, rows, tokens, start))
        times: list[list[float]] = [[] for _ in contenders]
        machines = []
        for _ in range(options.rounds):
            machines.append(machine())
            for kept, step in zip(times, contenders, strict=True):
                kept.append(min(seconds(step) for _ in range(3)))
        work = needs(rows, tokens, start, weights=options.weights, arithmetic="float32")
        bandwidth, rate = (max(values) for values in zip(*machines, strict=True))
        floor = max(work.bytes / bandwidth, work.float32_flop / rate)
        median = statistics.median(times[0])
        jax_alone = f"{statistics.median(times[1]) / median:.1f} x" if times[1:] else ""
        print(
            f"{name:26} {rows * tokens / median:9.1f} {median * 1e3:7.1f} {floor * 1e3:7.1f}"
            f" {floor / median:9.0%}   {jax_alone}   (best {min(times[0]) * 1e3:.1f} ms;"
            f" {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
