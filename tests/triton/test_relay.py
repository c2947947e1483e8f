"""Events of many calls in one response: each call gets its own, whole and in order."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton.engine_model import EventSender
from grok1_backend.triton.interface import RELAYED
from grok1_backend.triton.parsing import ClientRequest, RequestParser
from grok1_backend.triton.relay import CallName, Part, Receiver, pack, unpack
from grok1_backend.triton.responses import ResponseStream

GENERATION = RequestParser(end_ids=(2,), default_max_tokens=4).parse(
    ClientRequest(tensors={"input_ids": np.array([[5]], np.int32)})
)
WANTED = ("token_ids", "finish_reason", "relayed", "error")


def event(
    ids: tuple[int, ...],
    so_far: int,
    reason: FinishReason | None = None,
    error: EngineError | None = None,
) -> TokenEvent:
    return TokenEvent(
        request_id="r",
        token_ids=ids,
        log_probs=np.zeros(len(ids), np.float32),
        top_ids=np.zeros((len(ids), TOP_TOKENS), np.int32),
        top_log_probs=np.zeros((len(ids), TOP_TOKENS), np.float32),
        num_output_tokens=so_far,
        finish_reason=reason,
        error=error,
    )


class Calls:
    """Calls of one model, and the responses that each of them has got."""

    def __init__(self, request_of_triton: Any, *names: str) -> None:
        self.sender = EventSender()
        self.requests = [request_of_triton(*WANTED) for _ in names]
        self.streams = [ResponseStream(request) for request in self.requests]
        for stream, name in zip(self.streams, names, strict=True):
            stream.call = CallName.parse(name)

    def hold(self, request_of_triton: Any) -> threading.Event:
        """Keeps the sending thread busy until the event is set."""
        go = threading.Event()
        busy = request_of_triton()
        busy.sender.send = lambda *_, **__: go.wait(10)
        self.sender.sink(GENERATION, ResponseStream(busy))(event((1,), 1))
        return go

    def happens(self, call: int, what: TokenEvent) -> None:
        self.sender.sink(GENERATION, self.streams[call])(what)

    def parts(self, call: int) -> list[Part]:
        """What came as responses of this call, for whichever call."""
        return [
            part
            for response, _ in self.requests[call].sender.sent
            if RELAYED.name in response.outputs
            for part in unpack(response.outputs[RELAYED.name].item())
        ]

    def flags(self, call: int) -> list[int]:
        return [flags for _, flags in self.requests[call].sender.sent]


def test_a_step_is_one_response_for_all_calls_of_a_caller(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, "one/1", "one/2", "two/1")
    go = calls.hold(request_of_triton)
    for call in range(3):
        calls.happens(call, event((5 + call,), 1))
    calls.happens(1, event((9,), 2, FinishReason.LENGTH))
    go.set()
    calls.sender.close()
    first, second = calls.parts(0)
    assert (first.number, first.start, first.values["token_ids"]) == ("1", 0, (5,))
    assert (second.number, second.values["token_ids"], second.final) == ("2", (6, 9), True)
    assert calls.parts(1) == []
    assert [part.values["token_ids"] for part in calls.parts(2)] == [(7,)]
    assert [calls.flags(call) for call in range(3)] == [[0], [1], [0]]
    assert set(first.values) == {"token_ids", "finish_reason"}  # what the caller wanted


def test_where_one_call_cannot_carry_another_does(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, "one/1", "one/2", "one/3")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the caller has gone")

    calls.requests[0].sender.send = fail
    calls.streams[1].fail(EngineError(ErrorCode.INTERNAL, "closed before its events came"))
    go = calls.hold(request_of_triton)
    for call in range(3):
        calls.happens(call, event((5 + call,), 1))
    go.set()
    calls.sender.close()
    assert [part.number for part in calls.parts(2)] == ["1", "2", "3"]


def test_an_error_follows_what_came_before_it(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, "one/1")
    calls.happens(0, event((5,), 1))
    error = EngineError(ErrorCode.CANCELLED, "cancelled")
    calls.happens(0, event((), 1, FinishReason.CANCELLED, error))
    calls.sender.close()
    assert calls.parts(0)[-1].error == ("CANCELLED", "cancelled")
    assert calls.flags(0)[-1] == 1


def part(start: int, *ids: int, **more: Any) -> Part:
    return Part("1", start, len(ids), {"token_ids": ids}, **more)


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_taken_in_order_however_they_come(seed: int) -> None:
    chance = random.Random(seed)
    parts = [part(i, i) for i in range(6)] + [part(6, 6, 7), part(8, final=True)]
    chance.shuffle(parts)
    taken: list[int] = []
    receiver = Receiver(lambda values: taken.extend(values["token_ids"]))
    while parts:
        lot = [parts.pop() for _ in range(min(len(parts), chance.randint(1, 3)))]
        receiver.receive(unpack(pack(lot)))
        assert receiver.ended.is_set() == (not parts)
    assert taken == list(range(8))
    assert receiver.error is None


def test_parts_that_wait_are_taken_as_one() -> None:
    taken: list[Any] = []
    Receiver(taken.append).receive([part(1, 7), part(0, 6), part(2, final=True)])
    assert taken == [{"token_ids": (6, 7)}]


def test_what_ends_a_call_badly() -> None:
    taken: list[Any] = []
    receiver = Receiver(taken.append)
    receiver.receive([part(0, 1)])
    receiver.receive([part(1, final=True, error=("UNAVAILABLE", "full"))])
    assert receiver.ended.is_set()
    assert receiver.error is not None
    assert (receiver.error.code, receiver.error.message) == (ErrorCode.UNAVAILABLE, "full")
    assert len(taken) == 1

    def refuse(_: Any) -> None:
        taken.append(None)
        raise ValueError("no")

    receiver = Receiver(refuse)
    for one in (part(0, 1), part(1, 2, final=True)):
        receiver.receive([one])
    assert receiver.ended.is_set()
    assert receiver.error is not None
    assert receiver.error.code is ErrorCode.INTERNAL
    assert len(taken) == 2  # nothing after it has raised
