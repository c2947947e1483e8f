"""How the cost of a decode step grows: with slots, context, pages, and waiting requests.

* device: whole steps of the embedded model;
* host: the same engine before a runner that computes nothing, so that only scheduler, page
  accounting and events are left: the time of a step, and that of admitting a waiting request.

    python benchmarks/scale.py [--rounds N]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results import ROOT, Row

from grok1_backend.engine.build import ModelDirectory, build_runner
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import (
    TOP_TOKENS,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow, Runner, StepOutput
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.settings import EngineSettings

SLOTS = (1, 4, 16, 64)
CONTEXTS = (64, 1024, 2048, 4096, 7600)
POOLS = (1024, 4096)
"""Pages on the device."""
HOST_POOLS = (16_384, 131_072, 1_048_576)
WAITING = (0, 100, 1_000, 10_000)
PROMPT = 32
STREAMS = 4
"""Active slots where something else varies."""
DEVICE_STEPS, DEVICE_TOKENS = 100, 400
HOST_STEPS, HOST_TOKENS = 1000, 100_000
"""Steps to measure, and tokens of each stream: it starts before the others, and ends after."""
ENGINE = EngineSettings(max_queue=2 * WAITING[-1], max_generation_time=3600.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A condition under which steps are measured; the row is named after what varies."""

    by: str
    at: int
    slots: int = STREAMS
    context: int = PROMPT
    waiting: int = 0
    pages: int | None = None
    """Of the pool; None: as it is."""


@dataclasses.dataclass(frozen=True)
class Nothing:
    """A step that is done: every row draws the same token."""

    rows: int

    def result(self) -> StepOutput:
        return StepOutput(
            token_ids=np.full(self.rows, 100, np.int32),
            log_probs=np.zeros(self.rows, np.float32),
            top_ids=np.zeros((self.rows, TOP_TOKENS), np.int32),
            top_log_probs=np.zeros((self.rows, TOP_TOKENS), np.float32),
            finite=np.ones(self.rows, np.bool_),
        )


@dataclasses.dataclass
class IdleRunner:
    """A device that computes nothing, in no time; see `runner_api.Runner`."""

    num_slots: int
    num_pages: int
    page_size: int = 64
    context_length: int = 1_000_000
    vocab_size: int = 32768
    max_prefill_tokens: int = 512
    max_prefill_rows: int = 4
    num_compilations: int = 0

    def prefill_cost(self, lengths: Sequence[int]) -> int:
        return len(lengths) * max(lengths)

    def start_slot(
        self, slot: int, sampling: SamplingParams, history: NDArray[np.int32], num_prompt: int
    ) -> None:
        """Nothing to prepare."""

    def prefill(self, rows: Sequence[PrefillRow]) -> Nothing:
        return Nothing(len(rows))

    def prefill_scored(self, row: PrefillRow, next_token: int) -> Any:
        raise NotImplementedError

    def decode(self, rows: Sequence[DecodeRow]) -> Nothing:
        return Nothing(len(rows))

    def recover(self) -> None:
        """Nothing is lost."""


class Load:
    """Requests to one engine, with prompts that share no page."""

    def __init__(self, runner: Runner) -> None:
        self._engine = Engine(runner, end_ids=(), settings=ENGINE)
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count()
        self._vocab_size = runner.vocab_size

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def steps(self) -> int:
        return self._engine.stats().steps

    def submit(
        self, count: int, context: int, tokens: int, on_event: Callable[[TokenEvent], None]
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        for _ in range(count):
            prompt = self._rng.integers(10, self._vocab_size, context).tolist()
            name = str(next(self._numbers))
            self._engine.submit(
                GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling),
                on_event,
            )

    def run_streams(self, count: int, context: int, tokens: int) -> None:
        """Starts streams, and returns when each of them has a token."""
        begun, started = set[str](), threading.Event()

        def note(event: TokenEvent) -> None:
            begun.add(event.request_id)
            if len(begun) == count:
                started.set()

        self.submit(count, context, tokens, note)
        started.wait()

    def drain(self, count: int) -> float:
        """Seconds in which so many requests of one token are admitted and end."""
        ended = threading.Semaphore(0)
        began = time.perf_counter()
        self.submit(count, PROMPT, 1, lambda _: ended.release())
        submitted = time.perf_counter()
        for _ in range(count):
            ended.acquire()
        return time.perf_counter() - max(began, submitted)


def ignore(_: TokenEvent) -> None:
    """Of requests that only wait."""


def step_seconds(runner: Runner, point: Point, steps: int, tokens: int) -> float:
    """The mean time of a step while the streams run, and others wait behind them."""
    with Load(runner) as load:
        load.run_streams(point.slots, point.context, tokens)
        load.submit(point.waiting, PROMPT, 1, ignore)
        first, began = load.steps, time.perf_counter()
        while (done := load.steps - first) < steps:
            time.sleep(0.01)
        return (time.perf_counter() - began) / done


def queue_seconds(waiting: int) -> float:
    """The time to admit and end one of so many requests that wait, on the host."""
    with Load(IdleRunner(num_slots=STREAMS, num_pages=1024)) as load:
        return load.drain(waiting) / waiting


HOST_POINTS = (
    *(Point(by="active slots", at=slots, slots=slots) for slots in SLOTS),
    *(Point(by="context", at=context, context=context) for context in CONTEXTS),
    *(Point(by="pages of the pool", at=pages, pages=pages) for pages in HOST_POOLS),
    *(Point(by="waiting requests", at=waiting, waiting=waiting) for waiting in WAITING),
)
DEVICE_POINTS = (
    *(Point(by="active slots", at=slots, slots=slots) for slots in SLOTS),
    *(Point(by="context", at=context, context=context) for context in CONTEXTS),
    *(Point(by="pages of the pool", at=pages, pages=pages) for pages in POOLS),
)


def host_runner(point: Point) -> IdleRunner:
    pages = point.pages or point.slots * ((point.context + HOST_TOKENS) // 64 + 1)
    return IdleRunner(num_slots=point.slots, num_pages=pages)


def device_runners() -> dict[int, Runner]:
    """The embedded model with a small and a large pool, by its pages."""
    directory = ModelDirectory.read(ROOT / "embedded_model")
    runners: dict[int, Runner] = {}
    for pages, rows in zip(POOLS, (SLOTS, (1, STREAMS)), strict=True):
        settings = RunnerSettings(
            num_slots=rows[-1],
            num_pages=pages,
            prefill_tokens=(PROMPT, 512),
            prefill_rows=(1,),
            decode_rows=rows,
        )
        runners[pages] = build_runner(
            dataclasses.replace(directory, runner=settings), progress=lambda _: None
        )
    return runners


def measure(rounds: int) -> list[Row]:
    """All points in each round, so that what else the machine does meets them alike."""
    runners = device_runners()
    host: dict[Point, list[float]] = {point: [] for point in HOST_POINTS}
    device: dict[Point, list[float]] = {point: [] for point in DEVICE_POINTS}
    admitted: dict[int, list[float]] = {waiting: [] for waiting in WAITING if waiting}
    for _ in range(rounds):
        for point, samples in host.items():
            taken = step_seconds(host_runner(point), point, HOST_STEPS, HOST_TOKENS)
            samples.append(taken * 1e6)
        for waiting, samples in admitted.items():
            samples.append(queue_seconds(waiting) * 1e6)
        for point, samples in device.items():
            runner = runners[point.pages or POOLS[0]]
            samples.append(step_seconds(runner, point, DEVICE_STEPS, DEVICE_TOKENS))
    rows = [
        *(row("device, a step", "s", point.by, point.at, s) for point, s in device.items()),
        *(row("host, a step", "µs", point.by, point.at, s) for point, s in host.items()),
        *(row("host, an admission", "µs", "waiting requests", n, s) for n, s in admitted.items()),
    ]
    for made in rows:
        print(f"{made.name:56s} {statistics.median(made.ours):10.5g} {made.unit}", flush=True)
    return rows


def row(what: str, unit: str, by: str, at: int, samples: Sequence[float]) -> Row:
    """A row that says what varies, and where on that axis it lies."""
    details = {"what": what, "by": by, "at": at}
    return Row(name=f"{what}, {at} {by}", unit=unit, ours=samples, details=details)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    measure(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
