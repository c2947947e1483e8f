"""Events of many calls in one message: each call gets its own, whole and in order."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton.channel import Address, Inbox
from grok1_backend.triton.engine_model import EventSender
from grok1_backend.triton.parsing import ClientRequest, RequestParser
from grok1_backend.triton.relay import Part, Receiver
from grok1_backend.triton.responses import CallName, ResponseStream

GENERATION = RequestParser(end_ids=(2,), default_max_tokens=4).parse(
    ClientRequest(tensors={"input_ids": np.array([[5]], np.int32)})
)
WANTED = ("token_ids", "finish_reason", "error")


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
    """Calls of models, and what has come to each model."""

    def __init__(self, request_of_triton: Any, *callers: int) -> None:
        self.sender = EventSender()
        self.came: list[list[Part]] = [[] for _ in range(max(callers) + 1)]
        self.lots: list[int] = []
        """Numbers of parts that came at one time."""
        self.inboxes = [Inbox(functools.partial(self._note, parts)) for parts in self.came]
        self.requests = [request_of_triton(*WANTED) for _ in callers]
        self.streams = [ResponseStream(request) for request in self.requests]
        for number, (stream, caller) in enumerate(zip(self.streams, callers, strict=True)):
            stream.call = CallName(self.inboxes[caller].address, str(number))

    def _note(self, came: list[Part], parts: Sequence[Part]) -> None:
        came += parts
        self.lots.append(len(parts))

    def hold(self, request_of_triton: Any) -> threading.Event:
        """Keeps the sending thread busy until the event is set."""
        go = threading.Event()
        busy = request_of_triton()
        busy.sender.send = lambda *_, **__: go.wait(10)
        self.sender.sink(GENERATION, ResponseStream(busy))(event((1,), 1))
        return go

    def happens(self, call: int, what: TokenEvent) -> None:
        self.sender.sink(GENERATION, self.streams[call])(what)

    def wait(self, *counts: int) -> None:
        """Until so many parts have come to each model."""
        end = time.monotonic() + 10
        while [len(parts) for parts in self.came] != list(counts):
            assert time.monotonic() < end, self.came
            time.sleep(0.001)

    def sent(self, call: int) -> list[tuple[set[str], int]]:
        """Outputs and flags of the call's own responses."""
        return [
            (set(response.outputs), flags) for response, flags in self.requests[call].sender.sent
        ]

    def close(self) -> None:
        self.sender.close()
        for inbox in self.inboxes:
            inbox.close()


def test_a_step_is_one_message_for_all_calls_of_a_model(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, 0, 0, 1)
    go = calls.hold(request_of_triton)
    for call in range(3):
        calls.happens(call, event((5 + call,), 1))
    calls.happens(1, event((9,), 2, FinishReason.LENGTH))
    go.set()
    calls.wait(2, 1)
    calls.close()
    first, second = calls.came[0]
    assert (first.number, first.values["token_ids"], first.final) == ("0", (5,), False)
    assert (second.number, second.values["token_ids"], second.final) == ("1", (6, 9), True)
    assert [part.values["token_ids"] for part in calls.came[1]] == [(7,)]
    assert sorted(calls.lots) == [1, 2]
    assert [calls.sent(call) for call in range(3)] == [[], [(set(), 1)], []]
    assert set(first.values) == {"token_ids", "finish_reason"}  # what the caller wanted


def test_the_call_of_a_model_that_does_not_listen_ends(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, 0, 1)
    calls.streams[0].call = CallName(Address.new(), "0")
    for call in range(2):
        calls.happens(call, event((5,), 1))
    calls.wait(0, 1)
    calls.close()
    assert calls.sent(0) == [({"error"}, 1)]
    assert calls.sent(1) == []


def test_a_sender_must_know_the_secret(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, 0, 0)
    (inbox,) = calls.inboxes
    calls.streams[0].call = CallName(Address(inbox.address.name, "guess"), "0")
    for call in range(2):
        calls.happens(call, event((5 + call,), 1))
    calls.wait(1)
    calls.close()
    assert [part.values["token_ids"] for part in calls.came[0]] == [(6,)]
    assert calls.sent(0) == [({"error"}, 1)]


@pytest.mark.parametrize("text", ["", "/1", "name/1", "name./1", "../x.key/1"])
def test_what_names_no_call(text: str) -> None:
    with pytest.raises(EngineError, match="internal"):
        CallName.parse(text)


def test_a_call_is_named_as_text() -> None:
    name = CallName(Address.new(), "7")
    assert CallName.parse(str(name)) == name


def test_an_error_follows_what_came_before_it(request_of_triton: Any) -> None:
    calls = Calls(request_of_triton, 0)
    calls.happens(0, event((5,), 1))
    calls.wait(1)
    error = EngineError(ErrorCode.CANCELLED, "cancelled")
    calls.happens(0, event((), 1, FinishReason.CANCELLED, error))
    calls.wait(2)
    calls.close()
    assert calls.came[0][-1].error == ("CANCELLED", "cancelled")
    assert calls.sent(0) == [(set(), 1)]


def part(*ids: int, **more: Any) -> Part:
    return Part("1", {"token_ids": ids}, **more)


def test_parts_that_wait_are_taken_as_one() -> None:
    taken: list[Any] = []
    receiver = Receiver(taken.append)
    receiver.receive([part(5)])
    assert not receiver.ended.is_set()
    receiver.receive([part(6), part(7), part(final=True)])
    assert taken == [{"token_ids": (5,)}, {"token_ids": (6, 7)}]
    assert receiver.ended.is_set()
    assert receiver.error is None


def test_what_ends_a_call_badly() -> None:
    taken: list[Any] = []
    receiver = Receiver(taken.append)
    receiver.receive([part(1), part(final=True, error=("UNAVAILABLE", "full"))])
    assert receiver.ended.is_set()
    assert receiver.error is not None
    assert (receiver.error.code, receiver.error.message) == (ErrorCode.UNAVAILABLE, "full")
    assert taken == [{"token_ids": (1,)}]

    def refuse(_: Any) -> None:
        taken.append(None)
        raise ValueError("no")

    receiver = Receiver(refuse)
    for one in (part(1), part(2, final=True)):
        receiver.receive([one])
    assert receiver.ended.is_set()
    assert receiver.error is not None
    assert receiver.error.code is ErrorCode.INTERNAL
    assert len(taken) == 2  # nothing after it has raised
