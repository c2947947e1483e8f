"""The in-process interface, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

import asyncio
import doctest
import threading
from collections.abc import Iterator

import pytest
from fake_runner import FakeRunner, expected_output

from grok1_backend.engine import sample
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import FinishReason, GenerationRequest, SamplingParams
from grok1_backend.engine.sample import InferenceRunner, Request, sample_from_model, stream_async

END = 200


class Bytes:
    """Byte n is token n; those from 128 on are control tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 128 else b""


def expected_text(prompt: str, seed: int, max_len: int) -> str:
    output = expected_output(list(prompt.encode()), seed, max_len, 256, (END,))
    return b"".join(map(Bytes().token_bytes, output)).decode()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(vocab_size=256, context_length=64, num_slots=3)


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    with Engine(runner, end_ids=(END,), token_bytes=Bytes().token_bytes) as engine:
        yield engine


def test_the_generator_protocol_of_the_research_code(engine: Engine) -> None:
    server = InferenceRunner(engine, Bytes()).run()
    for prompt in ("one", "two"):
        assert next(server) is None
        answer = server.send(Request(prompt=prompt, rng_seed=7, max_len=9))
        assert answer == expected_text(prompt, 7, 9)
        assert sample_from_model(server, prompt, 6, 1.0) == expected_text(prompt, 42, 6)


def test_many_requests_in_flight(engine: Engine) -> None:
    server = InferenceRunner(engine, Bytes()).run()
    next(server)
    requests = [Request(prompt=f"prompt {i}", rng_seed=i, max_len=9) for i in range(7)]
    assert server.send(requests) == [expected_text(r.prompt, r.rng_seed, 9) for r in requests]


def test_a_refused_request_takes_the_others_back(engine: Engine) -> None:
    server = InferenceRunner(engine, Bytes()).run()
    next(server)
    with pytest.raises(EngineError) as raised:
        server.send([Request(prompt="good", max_len=30), Request(prompt="", max_len=9)])
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert engine.drain(20)
    assert engine.stats().pages_used == 0


def test_an_async_stream(engine: Engine) -> None:
    async def collect(name: str) -> list[int]:
        sampling = SamplingParams(max_tokens=8, seed=1)
        request = GenerationRequest(request_id=name, prompt=(65, 66), sampling=sampling)
        events = [event async for event in stream_async(engine, request)]
        assert [event.finish_reason is not None for event in events].count(True) == 1
        return [token for event in events for token in event.token_ids]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*(collect(str(number)) for number in range(5)))

    assert asyncio.run(together()) == [expected_output((65, 66), 1, 8, 256, (END,))] * 5


def test_leaving_an_async_stream_cancels_the_request(engine: Engine, runner: FakeRunner) -> None:
    left = threading.Event()

    def hold(_kind: str, _slots: list[int]) -> None:
        if runner.num_steps == 5:
            assert left.wait(20)

    async def leave() -> None:
        sampling = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
        request = GenerationRequest(request_id="a", prompt=(65,), sampling=sampling)
        stream = stream_async(engine, request)
        async for _ in stream:
            break
        await stream.aclose()

    runner.before_call = hold
    asyncio.run(leave())
    left.set()
    assert engine.drain(20)
    assert engine.stats().finished[FinishReason.CANCELLED] == 1


def test_the_examples_run(engine: Engine) -> None:
    outcome = doctest.testmod(sample, extraglobs={"engine": engine, "tokenizer": Bytes()})
    assert outcome.attempted > 8
    assert outcome.failed == 0
