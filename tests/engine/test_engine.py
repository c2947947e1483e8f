"""The engine with its thread: many callers, draining, closing, a device that dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from fake_runner import FakeRunner, expected_output

from grok1_backend.engine.engine import Engine
from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SessionTurn,
    TokenEvent,
)
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.engine.stats import Observer

PATIENCE = 20.0


class Stream:
    """The events of one request, and a way to wait for the last."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.ended = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self.ended.set()

    def wait(self) -> TokenEvent:
        assert self.ended.wait(PATIENCE)
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]


def submit(
    engine: Engine,
    request_id: str,
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 5,
    session: SessionTurn | None = None,
) -> Stream:
    stream = Stream()
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    request = GenerationRequest(
        request_id=request_id, prompt=prompt, sampling=sampling, session=session
    )
    engine.submit(request, stream)
    return stream


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    with Engine(runner, end_ids=()) as engine:
        yield engine


class Gate:
    """Holds the device up from its first decode step on, until it is opened."""

    def __init__(self, runner: FakeRunner) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        runner.before_call = self

    def __call__(self, kind: str, _slots: list[int]) -> None:
        if kind == "decode":
            self.reached.set()
            assert self.open.wait(PATIENCE)


def test_many_threads_get_each_its_own(engine: Engine) -> None:
    results: dict[int, list[int]] = {}

    def client(number: int) -> None:
        for turn in range(5):
            stream = submit(engine, f"{number}.{turn}", (number, turn), 6)
            stream.wait()
            results[number * 5 + turn] = stream.tokens

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {
        number * 5 + turn: expected_output((number, turn), 0, 6, 50)
        for number in range(8)
        for turn in range(5)
    }
    assert engine.drain(PATIENCE)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.finished[FinishReason.LENGTH] == 40
    assert stats.generation_tokens == 240
    assert stats.prompt_tokens == 80


def test_the_id_is_free_at_the_last_event(engine: Engine) -> None:
    chained = Stream()
    sampling = SamplingParams(max_tokens=3)
    request = GenerationRequest(request_id="a", prompt=(5,), sampling=sampling)

    def again(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            engine.submit(request, chained)

    engine.submit(request, again)
    assert chained.wait().error is None


def test_cancelling_many_at_random_moments(engine: Engine) -> None:
    streams = {}
    for number in range(60):
        name = str(number)
        streams[name] = submit(engine, name, (number % 50,), 40)
        if number % 3 == 0:
            engine.abort(name)
        if number % 7 == 0:
            time.sleep(0.001)
    for stream in streams.values():
        reason = stream.wait().finish_reason
        expected = expected_output(stream_prompt(streams, stream), 0, 40, 50)
        assert stream.tokens == expected[: len(stream.tokens)]
        assert reason is FinishReason.CANCELLED or stream.tokens == expected
    assert engine.drain(PATIENCE)
    assert engine.stats().pages_used == 0


def stream_prompt(streams: dict[str, Stream], stream: Stream) -> list[int]:
    return [int(name) % 50 for name, other in streams.items() if other is stream]


def test_draining_lets_requests_end_and_takes_no_more(engine: Engine, runner: FakeRunner) -> None:
    gate = Gate(runner)
    stream = submit(engine, "a")
    assert gate.reached.wait(PATIENCE)
    drained = Background(lambda: engine.drain(PATIENCE))
    while not engine.stats().draining:
        time.sleep(0.001)
    with pytest.raises(EngineError, match="the engine is draining") as raised:
        submit(engine, "b")
    assert raised.value.code is ErrorCode.UNAVAILABLE
    gate.open.set()
    assert drained.result() is True
    assert stream.events[-1].finish_reason is FinishReason.LENGTH


def test_draining_without_grace_ends_requests_with_a_clear_error(
    engine: Engine, runner: FakeRunner
) -> None:
    gate = Gate(runner)
    streams = [submit(engine, str(number), max_tokens=30) for number in range(10)]
    assert gate.reached.wait(PATIENCE)
    drained = Background(engine.drain)
    while not engine._aborts:
        time.sleep(0.001)
    gate.open.set()
    assert drained.result() is True
    for stream in streams:
        error = stream.events[-1].error
        assert error is not None
        assert error.code is ErrorCode.UNAVAILABLE
        assert error.message == "the engine is draining"


def test_closing_ends_everything_and_leaves_no_thread(runner: FakeRunner) -> None:
    engine = Engine(runner, end_ids=())
    streams = [submit(engine, str(number), max_tokens=40) for number in range(8)]
    submit(engine, "session", session=SessionTurn(correlation_id=1, start=True))
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "scheduler"]
    assert all(stream.ended.is_set() for stream in streams)
    with pytest.raises(EngineError, match="the engine is closed"):
        submit(engine, "late")
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    engine.close()


def test_a_dead_device_fails_every_request_and_the_engine_says_so(runner: FakeRunner) -> None:
    def dead(_kind: str, _slots: list[int]) -> None:
        raise RuntimeError("the device is gone")

    def not_again() -> None:
        raise RuntimeError("there is no device")

    engine = Engine(runner, end_ids=())
    assert engine.healthy
    runner.before_call = dead
    runner.recover = not_again  # type: ignore[method-assign]
    streams = [submit(engine, str(number)) for number in range(3)]
    errors = [stream.wait().error for stream in streams]
    messages = [error.message for error in errors if error]
    assert messages[0] == "the step failed: the device is gone"
    assert set(messages[1:]) <= {
        "the step failed: the device is gone",
        "the engine has failed: there is no device",
    }
    assert not engine.healthy
    with pytest.raises(EngineError, match="the engine has failed: there is no device") as raised:
        submit(engine, "late")
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert not engine.stats().healthy
    assert engine.drain()
    engine.close()


def test_an_idle_engine_closes_sessions_that_have_outlived_their_time(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grok1_backend.engine.engine.IDLE_TICK", 0.01)
    limits = EngineSettings(session_lifetime=0.2, max_generation_time=0.2, page_idle_time=0.05)
    with Engine(runner, end_ids=(), settings=limits) as engine:
        submit(engine, "a", session=SessionTurn(correlation_id="x", start=True)).wait()
        deadline = time.monotonic() + PATIENCE
        while engine.stats().sessions or engine.stats().pages_cached:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_observer_sees_every_moment(runner: FakeRunner) -> None:
    class Recorder(Observer):
        def __init__(self) -> None:
            self.moments: list[str] = []
            self.rows: list[tuple[int, int]] = []

        def admitted(self, queue_seconds: float) -> None:
            assert queue_seconds >= 0
            self.moments.append("admitted")

        def first_token(self, seconds: float) -> None:
            assert seconds >= 0
            self.moments.append("first")

        def next_tokens(self, seconds: Sequence[float]) -> None:
            assert min(seconds) >= 0
            self.moments += ["next"] * len(seconds)

        def finished(self, reason: FinishReason, seconds: float) -> None:
            assert seconds >= 0
            self.moments.append(reason.value)

        def step(self, rows: int, prefill_tokens: int) -> None:
            self.rows.append((rows, prefill_tokens))

    recorder = Recorder()
    with Engine(runner, end_ids=(), observer=recorder) as engine:
        submit(engine, "a", max_tokens=3).wait()
    assert recorder.moments == ["admitted", "first", "next", "next", "length"]
    assert recorder.rows == [(0, 3), (1, 0), (1, 0)]


def test_a_seed_is_drawn_for_a_request_without_one(engine: Engine, runner: FakeRunner) -> None:
    seeds = []
    start = runner.start_slot

    def record(slot: int, sampling: SamplingParams, *rest: object) -> None:
        seeds.append(sampling.seed)
        start(slot, sampling, *rest)  # type: ignore[arg-type]

    runner.start_slot = record  # type: ignore[method-assign, assignment]
    for name in "ab":
        stream = Stream()
        sampling = SamplingParams(max_tokens=3)
        request = GenerationRequest(request_id=name, prompt=(1,), sampling=sampling)
        engine.submit(request, stream)
        stream.wait()
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**64 for seed in seeds if seed is not None)


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._result: object = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        self._result = call()

    def result(self) -> object:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self._result


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue", 0),
        ("prefill_token_budget", 0),
        ("max_sessions", -1),
        ("session_lifetime", float("inf")),
        ("page_idle_time", 0.0),
        ("max_generation_time", float("nan")),
        ("max_generation_time", 7200.0),
        ("max_tokens_limit", 5),
    ],
)
def test_settings_outside_their_limits_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        EngineSettings(**{field: value})  # type: ignore[arg-type]
