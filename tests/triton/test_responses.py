"""Exactly one final response on every path, and nothing after it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton import cancellation
from grok1_backend.triton.cancellation import CancellationWatch
from grok1_backend.triton.channel import Address
from grok1_backend.triton.engine_model import EventSender
from grok1_backend.triton.front import join_rows
from grok1_backend.triton.parsing import ClientRequest, RequestParser
from grok1_backend.triton.responses import CallName, ResponseStream, answering, respond

GENERATION = RequestParser(end_ids=(2,), default_max_tokens=4).parse(
    ClientRequest(tensors={"input_ids": np.array([[5]], np.int32)})
)
REFUSED = EngineError(ErrorCode.UNAVAILABLE, "full")


def event(ids: tuple[int, ...], reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(
        request_id="r",
        token_ids=ids,
        log_probs=np.zeros(len(ids), np.float32),
        top_ids=np.zeros((len(ids), TOP_TOKENS), np.int32),
        top_log_probs=np.zeros((len(ids), TOP_TOKENS), np.float32),
        num_output_tokens=len(ids),
        finish_reason=reason,
    )


def test_only_wanted_outputs_are_sent(request_of_triton: Any) -> None:
    request = request_of_triton("a")
    ResponseStream(request).send({"a": np.zeros(1), "b": np.zeros(1)}, final=False)
    ((response, flags),) = request.sender.sent
    assert (set(response.outputs), flags) == ({"a"}, 0)


def test_nothing_follows_the_final_response(request_of_triton: Any) -> None:
    request = request_of_triton("a")
    stream = ResponseStream(request)
    stream.send({}, final=True)
    stream.send({}, final=False)
    stream.fail(REFUSED)
    assert [flags for _, flags in request.sender.sent] == [1]
    assert not stream.open
    assert not stream.cancelled()  # without asking the sender


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (REFUSED, "UNAVAILABLE"),
        (EngineError(ErrorCode.DEADLINE_EXCEEDED, "full"), "CANCELLED"),
        (RuntimeError("full"), "INTERNAL"),
    ],
)
def test_an_error_becomes_the_final_response(
    request_of_triton: Any, error: Exception, code: str
) -> None:
    request = request_of_triton()
    with answering(ResponseStream(request)):
        raise error
    ((response, flags),) = request.sender.sent
    assert flags == 1
    assert "full" in response.error.message
    assert response.error.code == getattr(type(response.error), code)


def test_an_error_becomes_an_output_for_a_calling_model(request_of_triton: Any) -> None:
    request = request_of_triton("error")
    stream = ResponseStream(request)
    stream.call = CallName(Address.new(), "1")
    stream.fail(REFUSED)
    ((response, flags),) = request.sender.sent
    assert flags == 1
    assert response.outputs["error"].tolist() == [[b"UNAVAILABLE", b"full"]]


def test_a_model_that_answers_at_once(request_of_triton: Any) -> None:
    def refuse(_: Any) -> Any:
        raise REFUSED

    assert respond(request_of_triton(), refuse).error.message == "full"
    assert set(respond(request_of_triton(), lambda _: {"a": np.zeros(1)}).outputs) == {"a"}


def test_what_waits_for_a_stream_goes_as_one_response_in_order(request_of_triton: Any) -> None:
    names = ("token_ids", "finish_reason")
    first, second = request_of_triton(*names), request_of_triton(*names)
    streams = [ResponseStream(first), ResponseStream(second)]
    blocked = threading.Event()
    sender = EventSender()
    slow = request_of_triton()
    slow.sender.send = lambda *_, **__: blocked.wait(10)  # the thread waits here meanwhile
    sender.sink(GENERATION, ResponseStream(slow))(event((1,)))
    for token_id in (5, 6):
        for stream in streams:
            sender.sink(GENERATION, stream)(event((token_id,)))
    sender.sink(GENERATION, streams[0])(event((), FinishReason.LENGTH))
    blocked.set()
    sender.close()
    sent = [(r.outputs["token_ids"].tolist(), f) for r, f in first.sender.sent]
    assert [token_id for ids, _ in sent for token_id in ids[0]] == [5, 6]
    assert [flags for _, flags in sent] == [0] * (len(sent) - 1) + [1]
    assert not any(flags for _, flags in second.sender.sent)


def test_a_client_that_has_gone_is_noticed(
    request_of_triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "PERIOD", 0.001)
    gone, done = request_of_triton(), request_of_triton()
    noticed, wrong = threading.Event(), threading.Event()
    watch = CancellationWatch()
    finished = ResponseStream(done)
    watch.watch(finished, wrong.set)
    finished.send({}, final=True)
    done.sender.is_gone = True
    watch.watch(ResponseStream(gone), noticed.set)
    gone.sender.is_gone = True
    assert noticed.wait(10)
    watch.close()
    assert not wrong.is_set()


def test_answers_of_unlike_length_make_a_batch() -> None:
    rows = [
        {
            "text_output": np.array([[b"a"]], dtype=object),
            "token_ids": np.array([[5, 6]], np.int32),
            "top_log_probs": np.ones((1, 2, 8), np.float32),
            "num_output_tokens": np.array([[2]], np.int32),
        },
        {
            "text_output": np.array([[b""]], dtype=object),
            "token_ids": np.empty((1, 0), np.int32),
            "top_log_probs": np.empty((1, 0, 8), np.float32),
            "num_output_tokens": np.array([[0]], np.int32),
        },
    ]
    joined = join_rows(rows)
    assert joined["text_output"].tolist() == [[b"a"], [b""]]
    assert joined["token_ids"].tolist() == [[5, 6], [-1, -1]]
    assert joined["top_log_probs"].shape == (2, 2, 8)
    assert joined["top_log_probs"].dtype == np.float32
    assert (joined["top_log_probs"][1] == 0).all()
    assert joined["num_output_tokens"].tolist() == [[2], [0]]
