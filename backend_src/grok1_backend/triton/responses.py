"""Responses out of a Python model: exactly one of them final, whatever happens."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.interface import ERROR, Tensors

logger = logging.getLogger(__name__)


def to_triton(error: EngineError) -> Any:
    """The error as Triton sends it to clients."""
    return pb_utils.TritonError(error.message, _triton_code(error.code))


def _triton_code(code: ErrorCode) -> Any:
    # Triton has no code for a deadline. The client no longer waits: CANCELLED comes nearest.
    name = "CANCELLED" if code is ErrorCode.DEADLINE_EXCEEDED else code.name
    return getattr(pb_utils.TritonError, name)


class ResponseStream:
    """The responses to one request. Thread-safe.

    The lock is more than order: the server frees what a sender points to when the final response
    is sent, and a question about cancellation that reaches it later reads freed memory.
    """

    def __init__(self, request: Any, wanted: Sequence[str] | None = None) -> None:
        """Takes the sender of a request.

        Args:
          request: Triton's.
          wanted: names of the outputs to send; None: those that the client requested.
        """
        self._sender = request.get_response_sender()
        self.wanted = frozenset(request.requested_output_names() if wanted is None else wanted)
        self.errors_as_outputs = False
        """Where a model of this server called: such a call loses the code of an error, and waits
        for ever when a stream ends with one."""
        self._lock = threading.Lock()
        self._open = True

    @property
    def open(self) -> bool:
        """Whether the final response is still to come."""
        return self._open

    def send(self, outputs: Tensors, *, final: bool) -> None:
        """Sends a response with those of the outputs that are wanted."""
        tensors = [
            pb_utils.Tensor(name, array) for name, array in outputs.items() if name in self.wanted
        ]
        self._send(pb_utils.InferenceResponse(tensors), final)

    def fail(self, error: EngineError) -> None:
        """Ends the request with an error."""
        if self.errors_as_outputs:
            texts = [error.code.value.encode(), error.message.encode()]
            tensor = pb_utils.Tensor(ERROR.name, ERROR.tensor(texts))
            self._send(pb_utils.InferenceResponse([tensor]), True)
        else:
            self._send(pb_utils.InferenceResponse(error=to_triton(error)), True)

    def cancelled(self) -> bool:
        """Whether the client has gone, or does not want the rest."""
        with self._lock:
            return self._open and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = not final
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            self._sender.send(response, flags=flags)


@contextlib.contextmanager
def answering(stream: ResponseStream) -> Iterator[None]:
    """What goes wrong inside becomes the end of the request."""
    try:
        yield
    except EngineError as error:
        stream.fail(error)
    except Exception as error:
        logger.exception("a request has failed")
        stream.fail(EngineError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))


def respond(request: Any, answer: Callable[[Any], Tensors]) -> Any:
    """The response of a model that answers within `execute`.

    Args:
      request: Triton's.
      answer: makes the outputs; its errors become the response.
    """
    try:
        outputs = answer(request)
    except EngineError as error:
        return pb_utils.InferenceResponse(error=to_triton(error))
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in outputs.items()]
    )
