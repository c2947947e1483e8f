"""Serves the engine as the model `grok1`: requests in, a stream of responses out.

`execute` only validates and enqueues, as Triton reuses a sequence's place when it returns. The
engine's events come on its scheduler thread, which must not wait for Triton: a thread of this
module's own sends them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.engine.requests import EventSink, FinishReason, GenerationRequest, TokenEvent
from grok1_backend.triton.cancellation import CancellationWatch
from grok1_backend.triton.channel import Address, Outbox
from grok1_backend.triton.handover import Handover
from grok1_backend.triton.interface import (
    ABORT,
    DRAIN,
    INTERNAL,
    MAX_DRAIN_SECONDS,
    Values,
)
from grok1_backend.triton.metrics import Metrics
from grok1_backend.triton.outputs import event_values, merge, report
from grok1_backend.triton.parsing import ClientRequest, Generation, RequestParser
from grok1_backend.triton.relay import Part
from grok1_backend.triton.requests import client_requests
from grok1_backend.triton.responses import CallName, ResponseStream, answering, drop_kept_tensors
from grok1_backend.triton.values import from_tensor

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What is needed of the engine."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def drain(self, grace_seconds: float) -> bool: ...

    def close(self) -> None: ...


class EngineModel:
    """The engine behind Triton's requests."""

    def __init__(self, engine: Engine, parser: RequestParser, metrics: Metrics) -> None:
        self._engine = engine
        self._parser = parser
        self._metrics = metrics
        self._watch = CancellationWatch()
        self._sender = EventSender()

    def serve(self, request: Any) -> None:
        """Takes one request in; every error becomes its response."""
        stream = ResponseStream(request)
        with answering(stream):
            (client,) = client_requests(request)
            if INTERNAL.name in client.tensors:
                name = from_tensor(INTERNAL, client.tensors[INTERNAL.name])
                stream.call = CallName.parse(name)
            if ABORT.name in client.tensors:
                self._abort(client, stream)
            elif DRAIN.name in client.tensors:
                self._drain(client, stream)
            else:
                self._generate(client, stream)

    def close(self) -> None:
        """Ends all requests, and the threads."""
        self._engine.close()
        self._sender.close()
        self._watch.close()
        self._metrics.close()
        drop_kept_tensors()

    def _generate(self, client: ClientRequest, stream: ResponseStream) -> None:
        generation = self._parser.parse(client)
        request_id = generation.request.request_id
        self._engine.submit(generation.request, self._sender.sink(generation, stream))
        if stream.call is not None:
            # A call holds one of few threads of the server until its first response: prompts that
            # wait in the queue would stall the running streams of the calling model.
            stream.send({}, final=False)
        else:
            self._watch.watch(stream, lambda: self._engine.abort(request_id))

    def _abort(self, client: ClientRequest, stream: ResponseStream) -> None:
        target = from_tensor(ABORT, client.tensors[ABORT.name])
        reason = FinishReason.CANCELLED if self._engine.abort(target) else None
        stream.send(report(target, reason), final=True)

    def _drain(self, client: ClientRequest, stream: ResponseStream) -> None:
        grace_seconds = from_tensor(DRAIN, client.tensors[DRAIN.name])
        if not 0 <= grace_seconds <= MAX_DRAIN_SECONDS:
            raise invalid(DRAIN.name, grace_seconds, DRAIN.limit)

        def wait() -> None:
            with answering(stream):
                if not self._engine.drain(grace_seconds):
                    raise EngineError(ErrorCode.INTERNAL, "the device does not answer")
                stream.send(report("", FinishReason.STOP), final=True)

        threading.Thread(target=wait, name="drain", daemon=True).start()


class EventSender:
    """Sends the engine's events; what waits for one stream goes as one response."""

    def __init__(self) -> None:
        self._handover: Handover[ResponseStream, tuple[Generation, TokenEvent]]
        self._handover = Handover("responses", self._send_all)
        self._outbox = Outbox()

    def sink(self, generation: Generation, stream: ResponseStream) -> Callable[[TokenEvent], None]:
        """What the engine calls with the events of a request."""
        return lambda event: self._handover.put(stream, (generation, event))

    def close(self) -> None:
        """Sends what is there and ends the thread."""
        self._handover.close()
        self._outbox.close()

    def _send_all(
        self, waiting: Mapping[ResponseStream, Sequence[tuple[Generation, TokenEvent]]]
    ) -> None:
        callers: dict[Address, dict[ResponseStream, Part]] = {}
        for stream, happened in waiting.items():
            last = happened[-1][1]
            values = merge([_values(generation, event) for generation, event in happened])
            if stream.call is None:
                _send(stream, values, last)
            else:
                parts = callers.setdefault(stream.call.caller, {})
                parts[stream] = _part(stream.call, stream.wanted, values, last)
        for caller, parts in callers.items():
            self._relay(caller, parts)

    def _relay(self, caller: Address, parts: Mapping[ResponseStream, Part]) -> None:
        """Sends the parts, and ends the calls that end."""
        lost: EngineError | None = None
        try:
            self._outbox.send(caller, list(parts.values()))
        except Exception as error:
            logger.exception("events of %d calls were not sent", len(parts))
            lost = EngineError(ErrorCode.INTERNAL, f"the caller does not listen: {error}")
        for stream, part in parts.items():
            try:
                if lost is not None:
                    stream.fail(lost)
                elif part.final:
                    stream.send({}, final=True)
            except Exception:
                logger.exception("call %s was not ended", stream.call)


def _values(generation: Generation, event: TokenEvent) -> Values:
    return event_values(
        event,
        log_probs=generation.return_log_probs,
        top_tokens=generation.return_top_tokens,
        prompt_text=generation.prompt_text,
    )


def _send(stream: ResponseStream, values: Values, last: TokenEvent) -> None:
    try:
        if last.error is not None:
            stream.fail(last.error)
        else:
            stream.send(values, final=last.finish_reason is not None)
    except Exception:
        logger.exception("a response of request %s was not sent", last.request_id)


def _part(call: CallName, wanted: Collection[str], values: Values, last: TokenEvent) -> Part:
    return Part(
        number=call.number,
        values={name: value for name, value in values.items() if name in wanted},
        final=last.finish_reason is not None,
        error=None if last.error is None else (last.error.code.value, last.error.message),
    )
