"""The engine on a real model: neither company, chunks, reuse nor preemption changes the tokens."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence
from pathlib import Path

import pytest

from grok1_backend.engine.build import ModelDirectory, build_runner
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SessionTurn,
    TokenEvent,
)
from grok1_backend.engine.runner import ModelRunner
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # compiles a dozen programs
MODEL = Path(__file__).resolve().parents[2] / "embedded_model"
RUNNER = RunnerSettings(
    num_slots=3,
    page_size=8,
    num_pages=14,  # one request of these tests fits, three do not
    prefill_tokens=(64,),
    prefill_rows=(1, 3),
    decode_rows=(1, 3),
)
SECONDS = 120.0

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form"
PROMPTS = (
    TEXT,
    TEXT + ", and void; and darkness was upon the face of the deep.",
    "And it came to pass in those days",
    TEXT[:40] + " was with God",
)
SETTINGS = (
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, repetition_penalty=1.3, max_tokens=40, ignore_eos=True),
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    directory = dataclasses.replace(ModelDirectory.read(MODEL), runner=RUNNER)
    return build_runner(directory, progress=lambda _line: None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL / "tokenizer.model")


def complete(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Runs the requests together; returns the tokens of each."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    for request in requests:
        engine.submit(request, events.put)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for _ in requests:
        while (event := events.get(timeout=SECONDS)).finish_reason is None:
            tokens[event.request_id] += event.token_ids
        tokens[event.request_id] += event.token_ids
        assert event.finish_reason is FinishReason.LENGTH, event.error
    return list(tokens.values())


def test_requests_get_in_company_what_they_get_alone(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    requests = [
        GenerationRequest(
            request_id=f"{i}.{j}", prompt=tuple(tokenizer.encode(prompt)), sampling=sampling
        )
        for i, prompt in enumerate(PROMPTS)
        for j, sampling in enumerate(SETTINGS)
    ]
    with Engine(runner, end_ids=(tokenizer.eos_id,)) as engine:
        alone = []
        for request in requests:
            alone += complete(engine, [request])
            engine._pages.clear()
        assert engine.stats().prefix_hit_tokens == engine.stats().preemptions == 0
    for budget in (16, 192):  # in small chunks, and three prompts together
        settings = EngineSettings(prefill_token_budget=budget)
        with Engine(runner, end_ids=(tokenizer.eos_id,), settings=settings) as engine:
            together = complete(engine, requests)
            stats = engine.stats()
        assert together == alone
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 0
        assert stats.pages_used == 0


def test_three_turns_equal_one_shot(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with Engine(runner, end_ids=(tokenizer.eos_id,)) as engine:
        history: list[int] = []
        for number, text in enumerate(("In the beginning", " And God said", " Then")):
            prompt = tuple(tokenizer.encode(text))
            turn = SessionTurn(correlation_id="c", start=number == 0, end=number == 2)
            request = GenerationRequest(
                request_id=str(number), prompt=prompt, sampling=greedy, session=turn
            )
            (answer,) = complete(engine, [request])
            history += prompt
            one_shot = GenerationRequest(
                request_id="one-shot", prompt=tuple(history), sampling=greedy
            )
            engine._pages.clear()
            assert complete(engine, [one_shot]) == [answer]
            history += answer
