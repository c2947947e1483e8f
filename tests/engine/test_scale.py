"""What a step costs the host does not grow with what it does not touch.

Counted in bytecode instructions of the engine, so that no clock has a say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from fake_runner import FakeRunner

from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import GenerationRequest, SamplingParams
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow
from grok1_backend.engine.settings import EngineSettings

SETTINGS = EngineSettings(max_queue=20_000)


class QuietRunner(FakeRunner):
    """Draws the same token for every row, and looks at nothing."""

    def prefill(self, rows: list[PrefillRow]) -> Any:  # type: ignore[override]
        return self._step("prefill", [(row.slot, 7) for row in rows])

    def decode(self, rows: list[DecodeRow]) -> Any:  # type: ignore[override]
        return self._step("decode", [(row.slot, 7) for row in rows])


class TurnedEngine(Engine):
    """Without a thread: the test takes the turns."""

    def _start(self) -> None:
        pass

    def ask(self, name: str, prompt: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        tokens = tuple(i % 50 for i in range(prompt))
        self.submit(
            GenerationRequest(request_id=name, prompt=tokens, sampling=sampling), lambda _: None
        )

    def turns(self, count: int) -> None:
        for _ in range(count):
            self._turn()


def engine(*, slots: int = 4, pages: int = 4096) -> TurnedEngine:
    runner = QuietRunner(
        num_slots=slots,
        num_pages=pages,
        page_size=16,
        context_length=9000,
        max_prefill_tokens=512,
    )
    return TurnedEngine(runner, end_ids=(), settings=SETTINGS)


def instructions(work: Callable[[], None]) -> int:
    """How many bytecode instructions of the engine the work takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            if "grok1_backend" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # what Python 3.12 asks when a trace is set
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    assert count
    return count


def running(context: int = 8, *, slots: int = 4, pages: int = 4096) -> TurnedEngine:
    """An engine with every slot at work, long before any of them ends."""
    made = engine(slots=slots, pages=pages)
    for number in range(slots):
        made.ask(f"running {number}", context, 400)
    made.turns(slots * (context // 512 + 1) + 2)
    assert made.stats().running == slots
    return made


def cost_of_steps(made: TurnedEngine) -> int:
    """Of 16 steps: each stream crosses the end of a page once."""
    return instructions(lambda: made.turns(16))


def cost_with_waiting(waiting: int) -> tuple[int, int]:
    """Of 16 steps beside a full batch, and of taking in and admitting one of those that wait."""
    made = running()
    for number in range(waiting):
        made.ask(f"waiting {number}", 8, 1)
    made.turns(1)
    steps = cost_of_steps(made)
    made.abort("running 0")
    return steps, instructions(lambda: made.turns(1))


def test_requests_that_wait_cost_a_step_nothing() -> None:
    few, many = cost_with_waiting(10), cost_with_waiting(10_000)
    assert many[0] == few[0]
    assert many[1] <= 1.1 * few[1]  # entries that an ended request left in a heap


def test_aborting_those_that_wait_costs_each_the_same() -> None:
    def cost(waiting: int) -> float:
        made = running()
        for number in range(waiting):
            made.ask(f"waiting {number}", 8, 1)
        made.turns(1)

        def abort() -> None:
            for number in range(waiting):
                made.abort(f"waiting {number}")
            made.turns(1)

        return instructions(abort) / waiting

    assert cost(2000) <= 1.2 * cost(200)


@pytest.mark.parametrize("pages", [1024, 65_536])
def test_pages_that_nobody_uses_cost_nothing(pages: int) -> None:
    assert cost_of_steps(running(pages=pages)) == cost_of_steps(running())


def test_context_costs_the_host_nothing() -> None:
    assert cost_of_steps(running(context=4000)) <= 1.02 * cost_of_steps(running(context=400))


def test_slots_cost_no_more_than_their_number() -> None:
    assert cost_of_steps(running(slots=64)) <= 8 * cost_of_steps(running(slots=8))
