"""What the sampler costs at 8 rows of 131072 tokens: plain and full sampling over greedy.

They take turns in one run. "Every edit and filter" has all of them on in each row, "top-p alone"
that one filter. Their thresholds lie among the 128 best tokens, as nearly always with a trained
model; in the nearly flat distribution thousands of tokens are kept, and the threshold is searched
over the whole vocabulary.

    python benchmarks/sampler.py [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from results import Row

from grok1_backend.engine.decode_state import DecodeState, initial_state, slot_start, start_slot
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.sampler import Variant, sample

ROWS, VOCABULARY, CONTEXT = 8, 131072, 8192

SETTINGS = {
    Variant.GREEDY: SamplingParams(temperature=0.0),
    Variant.PLAIN: SamplingParams(temperature=0.8),
    Variant.FULL: SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        min_tokens=8,
        end_ids=(2,),
        bad_words=((5, 6), (7,)),
        logit_bias=((11, 1.0),),
    ),
}


def started(params: SamplingParams) -> DecodeState:
    """A state whose slots all run a request with these settings after 100 tokens of prompt."""
    state = initial_state(ROWS, VOCABULARY)
    history = np.arange(100, dtype=np.int32)
    for slot in range(ROWS):
        request = SamplingParams(**{**vars(params), "seed": slot})
        start = slot_start(request, history, 100, vocab_size=VOCABULARY, context_length=CONTEXT)
        state = jax.jit(start_slot, donate_argnums=0)(state, np.int32(slot), start)
    return state


def stepper(variant: Variant, params: SamplingParams, logits: jax.Array) -> Callable[[], float]:
    """A function that runs one step and returns its seconds."""
    step = jax.jit(functools.partial(sample, variant=variant), donate_argnums=0)
    slots, advance = jnp.arange(ROWS), jnp.ones(ROWS, bool)
    state = started(params)

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, logits, slots, advance))
        return time.perf_counter() - begin

    run()  # compiles
    return run


def measure(rounds: int) -> list[Row]:
    """A row for each kind of sampling; the other figure is the greedy one."""
    noise = np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    peaked, flat = jnp.asarray(6.0 * noise), jnp.asarray(noise)
    top_p = SamplingParams(temperature=0.8, top_p=0.9)
    steps = {
        "greedy": stepper(Variant.GREEDY, SETTINGS[Variant.GREEDY], peaked),
        "temperature only": stepper(Variant.PLAIN, SETTINGS[Variant.PLAIN], peaked),
        "every edit and filter": stepper(Variant.FULL, SETTINGS[Variant.FULL], peaked),
        "top-p alone": stepper(Variant.FULL, top_p, peaked),
        "top-p alone, nearly flat": stepper(Variant.FULL, top_p, flat),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            times[name].append(run())
    return [
        Row(name=f"sampling, {name}", unit="s", ours=seconds, peers={"greedy": times["greedy"]})
        for name, seconds in times.items()
    ]


def main() -> None:
    """Prints milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    for row in measure(parser.parse_args().rounds):
        found = row.record()
        print(f"{row.name:36s} {found['ours'] * 1e3:8.2f} ms  {found['ratio']:6.2f} x greedy")


if __name__ == "__main__":
    main()
