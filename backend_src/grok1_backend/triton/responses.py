"""Responses out of a Python model: exactly one of them final, whatever happens."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.channel import Address
from grok1_backend.triton.interface import ERROR, Values, as_tensor, left_out

logger = logging.getLogger(__name__)

_KEPT_TENSORS = 16384
"""Enough for the common tokens of a large vocabulary, with their texts: some MB."""
_KEPT_CHARACTERS = 64
_sending = threading.Lock()
"""Held while a response is sent: a tensor that is sent for the first time is copied into shared
memory then, which two threads must not do to the same one at the same time."""


def to_triton(error: EngineError) -> Any:
    """The error as Triton sends it to clients."""
    return pb_utils.TritonError(error.message, _triton_code(error.code))


def _triton_code(code: ErrorCode) -> Any:
    # Triton has no code for a deadline. The client no longer waits: CANCELLED comes nearest.
    name = "CANCELLED" if code is ErrorCode.DEADLINE_EXCEEDED else code.name
    return getattr(pb_utils.TritonError, name)


def output_tensor(name: str, value: Any) -> Any:
    """An output's tensor for a response.

    Those of short values that come again and again (no finish reason, an empty list, a token, a
    count) are kept, in shared memory, where they are made and copied once.
    """
    kept = (
        isinstance(value, int)
        or (isinstance(value, str) and len(value) <= _KEPT_CHARACTERS)
        or (isinstance(value, tuple) and len(value) <= 1)
    )
    return _kept_tensor(name, value) if kept else _new_tensor(name, value)


def _new_tensor(name: str, value: Any) -> Any:
    return pb_utils.Tensor(name, as_tensor(name, value))


_kept_tensor = functools.lru_cache(_KEPT_TENSORS)(_new_tensor)


def drop_kept_tensors() -> None:
    """Lets go of what is kept, while Python and the shared memory still are."""
    _kept_tensor.cache_clear()


class CallName(NamedTuple):
    """How the input `internal` names a call: `address/number`."""

    caller: Address
    number: str

    @classmethod
    def parse(cls, text: str) -> CallName:
        """The name from its text.

        Raises:
          EngineError: INVALID_ARG if it is none.
        """
        caller, _, number = text.partition("/")
        return cls(Address.parse(caller), number)

    def __str__(self) -> str:
        return f"{self.caller}/{self.number}"


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
        self.call: CallName | None = None
        """Where a model of this server called. Such a call loses the code of an error, and waits
        for ever when a stream ends with one: it gets errors as an output."""
        self._lock = threading.Lock()
        self._open = True

    @property
    def open(self) -> bool:
        """Whether the final response is still to come."""
        return self._open

    def send(self, outputs: Values, *, final: bool) -> bool:
        """Sends a response with those of the outputs that are wanted; False after the final one."""
        tensors = [
            output_tensor(name, value)
            for name, value in outputs.items()
            if name in self.wanted and not left_out(name, value)
        ]
        return self._send(pb_utils.InferenceResponse(tensors), final)

    def fail(self, error: EngineError) -> None:
        """Ends the request with an error."""
        if self.call is not None:
            texts = [error.code.value.encode(), error.message.encode()]
            tensor = pb_utils.Tensor(ERROR.name, ERROR.tensor(texts))
            self._send(pb_utils.InferenceResponse([tensor]), True)
        else:
            self._send(pb_utils.InferenceResponse(error=to_triton(error)), True)

    def cancelled(self) -> bool:
        """Whether the client has gone, or does not want the rest."""
        with self._lock:
            return self._open and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> bool:
        with self._lock:
            if not self._open:
                return False
            self._open = not final
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            with _sending:
                self._sender.send(response, flags=flags)
        return True


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


def respond(request: Any, answer: Callable[[Any], Values]) -> Any:
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
        [output_tensor(name, value) for name, value in outputs.items()]
    )
