"""What the engine's parts gain, each against the same engine without it, in one run.

* KV bytes of a request, against a cache of the whole context for every slot;
* the gap between tokens of running streams while a long prompt arrives, in chunks and at once;
* the time to the first token of a prompt whose beginning is known, against an unknown one;
* the time of a decode step by active slots, against one slot.

    python benchmarks/engine.py [--model DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import time
from pathlib import Path

import numpy as np
from results import ROOT, Row

from grok1_backend.engine.build import ModelDirectory, build_runner
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import GenerationRequest, SamplingParams, TokenEvent
from grok1_backend.engine.runner import ModelRunner
from grok1_backend.engine.settings import EngineSettings

LONG_PROMPT = 2048
RUNNING_STREAMS = 3
ENGINE = EngineSettings()


WITHOUT = "without"
"""What a row's other figure is named."""


class Stream:
    """A running request and the times at which its tokens came."""

    _count = 0

    def __init__(self, engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> None:
        Stream._count += 1
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.times: list[float] = []
        self.started = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        request = GenerationRequest(
            request_id=f"stream-{Stream._count}", prompt=prompt, sampling=sampling
        )
        engine.submit(request, self._take)

    def _take(self, event: TokenEvent) -> None:
        self.times.append(time.perf_counter())
        if event.error is not None:
            raise event.error
        self.events.put(event)

    def wait(self) -> None:
        """Until the request has ended."""
        while self.events.get().finish_reason is None:
            pass

    def wait_for_first(self) -> float:
        """Seconds from submission to the first token."""
        self.events.get()
        return self.times[0] - self.started


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(10, vocab_size, length).tolist())


def kv_bytes(runner: ModelRunner, tokens: int = 150) -> Row:
    """Pages that a request of so many tokens holds, against a full context."""
    config, itemsize = runner.config, np.dtype(runner.settings.dtype).itemsize
    position = 2 * config.num_layers * config.num_kv_heads * config.key_size * itemsize
    with Engine(runner, end_ids=(config.eos_token,)) as engine:
        stream = Stream(engine, tuple(range(10, 10 + tokens - 8)), 8)
        held = 0
        while not stream.events.qsize() or stream.events.get().finish_reason is None:
            held = max(held, engine.stats().pages_used)
    ours = held * runner.page_size * position
    whole = config.sequence_len * position
    return compared(f"KV bytes, {tokens} tokens", "bytes", [ours], [whole])


def longest_gap(engine: Engine, rng: np.random.Generator, vocab_size: int) -> float:
    """The longest time between two tokens of running streams while a long prompt arrives."""
    streams = [
        Stream(engine, random_prompt(rng, 16, vocab_size), 120) for _ in range(RUNNING_STREAMS)
    ]
    for stream in streams:
        stream.wait_for_first()
    arrival = time.perf_counter()
    late = Stream(engine, random_prompt(rng, LONG_PROMPT, vocab_size), 1)
    late.wait()
    for stream in streams:
        stream.wait()
    gaps = [
        after - before
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
        if after > arrival and before < late.times[-1]
    ]
    return max(gaps)


def inter_token_gap(runner: ModelRunner, rounds: int) -> list[Row]:
    """Chunks of the smallest and of the largest bucket, against no long prompt at all."""
    rng, vocab_size = np.random.default_rng(0), runner.vocab_size
    end_ids = (runner.config.eos_token,)
    quiet: list[float] = []
    chunked: dict[int, list[float]] = {size: [] for size in runner.settings.prefill_tokens}
    for _ in range(rounds):
        for size, samples in chunked.items():
            settings = dataclasses.replace(ENGINE, prefill_token_budget=size)
            with Engine(runner, end_ids=end_ids, settings=settings) as engine:
                samples.append(longest_gap(engine, rng, vocab_size))
        with Engine(runner, end_ids=end_ids) as engine:
            alone = Stream(engine, random_prompt(rng, 16, vocab_size), 120)
            alone.wait()
            gaps = np.diff(alone.times[1:])
            quiet.append(float(gaps.max()))
    name = f"longest gap, {LONG_PROMPT}-token prompt in chunks of"
    return [compared(f"{name} {size}", "s", samples, quiet) for size, samples in chunked.items()]


def prefix_reuse(runner: ModelRunner, rounds: int) -> Row:
    """Time to the first token of a prompt that is known but for its end, against a new one."""
    rng, vocab_size = np.random.default_rng(1), runner.vocab_size
    known: list[float] = []
    new: list[float] = []
    with Engine(runner, end_ids=(runner.config.eos_token,)) as engine:
        shared = random_prompt(rng, LONG_PROMPT, vocab_size)
        Stream(engine, shared, 1).wait()
        for _ in range(rounds):
            for samples, beginning in (
                (known, shared),
                (new, random_prompt(rng, LONG_PROMPT, vocab_size)),
            ):
                stream = Stream(engine, beginning + random_prompt(rng, 16, vocab_size), 1)
                samples.append(stream.wait_for_first())
    name = f"time to first token, {LONG_PROMPT} of {LONG_PROMPT + 16} known"
    return compared(name, "s", known, new)


def decode_steps(runner: ModelRunner, rounds: int) -> list[Row]:
    """Seconds a step by active slots, at 64 tokens of context each."""
    rng, vocab_size = np.random.default_rng(2), runner.vocab_size
    samples: dict[int, list[float]] = {rows: [] for rows in runner.settings.decode_rows}
    for _ in range(rounds):
        for rows, seconds in samples.items():
            with Engine(runner, end_ids=(runner.config.eos_token,)) as engine:
                prompts = [random_prompt(rng, 32, vocab_size) for _ in range(rows)]
                streams = [Stream(engine, prompt, 64) for prompt in prompts]
                for stream in streams:
                    stream.wait()
                start = max(stream.times[0] for stream in streams)
                times = sorted(t for stream in streams for t in stream.times if t >= start)
                seconds.append((times[-1] - start) / (len(times) / rows))
    one = samples[runner.settings.decode_rows[0]]
    return [
        compared(f"decode step, {rows} slots", "s", seconds, one)
        for rows, seconds in samples.items()
    ]


def compared(name: str, unit: str, ours: list[float], without: list[float]) -> Row:
    """A row whose ratio is ours over the same engine without the part."""
    return Row(name=name, unit=unit, ours=ours, peers={WITHOUT: without})


def measure(model: Path, rounds: int) -> list[Row]:
    """All rows, of the model in a directory."""
    runner = build_runner(ModelDirectory.read(model), lambda _: None)
    return [
        kv_bytes(runner),
        *inter_token_gap(runner, rounds),
        prefix_reuse(runner, rounds),
        *decode_steps(runner, rounds),
    ]


def main() -> None:
    """Prints a table; `run.py` writes the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "embedded_model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for row in measure(arguments.model, arguments.rounds):
        found = row.record()
        print(f"{row.name:52s} {found['ours']:12.6g} {row.unit:5s} {found['ratio']:8.3f} x")


if __name__ == "__main__":
    main()
