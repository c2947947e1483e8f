"""The text models that need no sequence: text in, calls of `grok1`, text out.

`grok1_generate` streams the answer to one prompt; `grok1_complete` sends one response with the
answers to all prompts of a request. Each prompt is followed by a thread, as calls block; the
thread that runs `execute` only hands it over.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.triton.calls import Call, Caller
from grok1_backend.triton.cancellation import CancellationWatch
from grok1_backend.triton.interface import (
    FINISH_REASON,
    GROK1,
    PROMPT_TEXT,
    STREAM,
    TEXT_OUTPUT,
    Tensors,
    Values,
    as_tensor,
    left_out,
)
from grok1_backend.triton.parsing import ClientRequest
from grok1_backend.triton.requests import client_requests
from grok1_backend.triton.responses import ResponseStream, answering
from grok1_backend.triton.text_steps import NEEDED, read_prompt, response_text
from grok1_backend.triton.values import from_plain, from_tensor

MAX_CALLS = 1024
"""Prompts at work at one time, a thread each."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one prompt: a call of `grok1`, and how its tokens become text."""

    call: Call
    caller: Caller
    tokenizer: Tokenizer

    def follow(self, take: Callable[[Values], None]) -> None:
        """Hands the outputs of a text model to `take`, response by response, as `Caller.follow`."""
        self.caller.follow(
            self.call,
            lambda reply: take({TEXT_OUTPUT.name: response_text(self.tokenizer, reply), **reply}),
        )

    def abort(self) -> None:
        """Cancels the call, if it runs."""
        self.caller.abort(self.call)


class TextFront:
    """What both models share: the threads, the limit on them, and clients that go away."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._caller = Caller()
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="call")
        self._free = threading.Semaphore(MAX_CALLS)
        self._watch = CancellationWatch()

    def serve(self, request: Any) -> None:
        """Takes one request in; every error becomes its response."""
        stream = ResponseStream(request)
        with answering(stream):
            clients = client_requests(request)
            answers = [self._answer_to(self.adapt(client), stream.wanted) for client in clients]
            self._watch.watch(stream, lambda: abort_all(answers))
            self.start(answers, stream)

    def adapt(self, client: ClientRequest) -> ClientRequest:
        """The request as this model serves it."""
        return client

    def start(self, answers: Sequence[Answer], stream: ResponseStream) -> None:
        """Lets threads work on the answers, and returns."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits for the calls under way, and ends the threads."""
        self._threads.shutdown()
        self._watch.close()
        self._caller.close()

    def run(self, work: Any, *arguments: Any) -> Future[Any]:
        """Lets a thread do some work.

        Raises:
          EngineError: UNAVAILABLE if too many are at work.
        """
        if not self._free.acquire(blocking=False):
            message = f"{MAX_CALLS} prompts are at work, the limit"
            raise EngineError(ErrorCode.UNAVAILABLE, message)
        future = self._threads.submit(work, *arguments)
        future.add_done_callback(lambda _: self._free.release())
        return future

    def _answer_to(self, client: ClientRequest, wanted: Collection[str]) -> Answer:
        prompt = read_prompt(self._tokenizer, client)
        needed = (*NEEDED, FINISH_REASON)
        call = Call(
            prompt_ids=prompt.ids,
            settings=client.tensors | {PROMPT_TEXT.name: PROMPT_TEXT.tensor(prompt.text)},
            parameters=client.parameters,
            request_id=client.request_id or uuid.uuid4().hex,
            timeout=client.timeout,
            wanted=tuple(o.name for o in GROK1.outputs if o.name in wanted or o in needed),
        )
        return Answer(call, self._caller, self._tokenizer)


def abort_all(answers: Sequence[Answer]) -> None:
    """Cancels the answers that are still under way."""
    for answer in answers:
        answer.abort()


class GenerateModel(TextFront):
    """`grok1_generate`: each response as it comes."""

    def start(self, answers: Sequence[Answer], stream: ResponseStream) -> None:
        (answer,) = answers
        self.run(self._answer, answer, stream)

    def _answer(self, answer: Answer, stream: ResponseStream) -> None:
        def take(outputs: Values) -> None:
            with answering(stream):
                stream.send(outputs, final=outputs[FINISH_REASON.name] != "")

        with answering(stream):
            answer.follow(take)


class CompleteModel(TextFront):
    """`grok1_complete`: all answers in one response."""

    def adapt(self, client: ClientRequest) -> ClientRequest:
        """The request with `stream` false, which is the only value it may have had."""
        given = client.parameters.get(STREAM.name, False)
        streams = from_plain(STREAM, given, where=STREAM.name)
        if STREAM.name in client.tensors:
            streams = from_tensor(STREAM, client.tensors[STREAM.name])
        if streams:
            raise invalid(STREAM.name, True, "grok1_complete answers once; use grok1_generate")
        tensors = client.tensors | {STREAM.name: STREAM.tensor(False)}
        return dataclasses.replace(client, tensors=tensors)

    def start(self, answers: Sequence[Answer], stream: ResponseStream) -> None:
        batch = _Batch(answers, stream)
        for row in range(len(answers)):
            self.run(batch.answer, row)


class _Batch:
    """The prompts of one request, whose answers make one response."""

    def __init__(self, answers: Sequence[Answer], stream: ResponseStream) -> None:
        self._answers = answers
        self._stream = stream
        self._outputs: dict[int, Values] = {}
        self._lock = threading.Lock()

    def answer(self, row: int) -> None:
        """Gets one answer; the last one sends the response, the first to fail ends all."""
        with answering(self._stream):
            try:
                taken: list[Values] = []
                self._answers[row].follow(taken.append)
                (outputs,) = taken
            except EngineError as error:
                self._stream.fail(error)  # first, or the others' ends would be the answer
                abort_all([*self._answers[:row], *self._answers[row + 1 :]])
                return
            with self._lock:
                self._outputs[row] = outputs
                complete = len(self._outputs) == len(self._answers)
            if complete:
                rows = [self._outputs[row] for row in range(len(self._answers))]
                self._stream.send(join_rows(rows), final=True)


def join_rows(rows: Sequence[Values]) -> Tensors:
    """Outputs of several prompts as one batch; lists of unlike length are filled at their ends.

    Token ids are filled with -1, other numbers with 0; `num_output_tokens` says where.
    """
    return {
        name: _stack(name, [as_tensor(name, row[name]) for row in rows])
        for name in rows[0]
        if not all(left_out(name, row[name]) for row in rows)
    }


def _stack(name: str, arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    if arrays[0].dtype == np.object_:
        return np.concatenate(arrays)
    length = max(array.shape[1] for array in arrays)
    filler = -1 if name.endswith("_ids") else 0
    padded = [
        np.pad(
            array,
            [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)],
            constant_values=filler,
        )
        for array in arrays
    ]
    return np.concatenate(padded)
