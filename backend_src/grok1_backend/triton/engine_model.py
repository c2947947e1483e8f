"""Serves the engine as the model `grok1`: requests in, a stream of responses out.

`execute` only validates and enqueues, as Triton reuses a sequence's place when it returns. The
engine's events come on its scheduler thread, which must not wait for Triton: a thread of this
module's own sends them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.engine.requests import EventSink, FinishReason, GenerationRequest, TokenEvent
from grok1_backend.triton.cancellation import CancellationWatch
from grok1_backend.triton.interface import ABORT, DRAIN, INTERNAL, MAX_DRAIN_SECONDS
from grok1_backend.triton.metrics import Metrics
from grok1_backend.triton.outputs import event_tensors, merge, report
from grok1_backend.triton.parsing import ClientRequest, Generation, RequestParser
from grok1_backend.triton.requests import client_requests
from grok1_backend.triton.responses import ResponseStream, answering
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
            stream.errors_as_outputs = INTERNAL.name in client.tensors
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

    def _generate(self, client: ClientRequest, stream: ResponseStream) -> None:
        generation = self._parser.parse(client)
        request_id = generation.request.request_id
        self._engine.submit(generation.request, self._sender.sink(generation, stream))
        if stream.errors_as_outputs:
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
    """A thread that sends events; what waits for one stream goes as one response."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[ResponseStream, Generation, TokenEvent] | None]
        self._events = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def sink(self, generation: Generation, stream: ResponseStream) -> Callable[[TokenEvent], None]:
        """What the engine calls with the events of a request."""
        return lambda event: self._events.put((stream, generation, event))

    def close(self) -> None:
        """Sends what is there and ends the thread."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            waiting: dict[ResponseStream, tuple[Generation, list[TokenEvent]]] = {}
            last = False
            while item is not None:
                stream, generation, event = item
                waiting.setdefault(stream, (generation, []))[1].append(event)
                try:
                    item = self._events.get_nowait()
                    last = item is None
                except queue.Empty:
                    break
            for stream, (generation, events) in waiting.items():
                self._send(stream, generation, merge(events))
            if last:
                return

    def _send(self, stream: ResponseStream, generation: Generation, event: TokenEvent) -> None:
        try:
            if event.error is not None:
                stream.fail(event.error)
            else:
                tensors = event_tensors(
                    event,
                    log_probs=generation.return_log_probs,
                    top_tokens=generation.return_top_tokens,
                    prompt_text=generation.prompt_text,
                )
                stream.send(tensors, final=event.finish_reason is not None)
        except Exception:
            logger.exception("a response of request %s was not sent", event.request_id)
