"""What `grok1` generates for the models that call it, on its way: parts of calls."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.interface import Values
from grok1_backend.triton.outputs import merge

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """One event of one call."""

    number: str
    """The caller's, of the call."""
    values: Values
    """Of the outputs that the caller asked for."""
    final: bool = False
    error: tuple[str, str] | None = None
    """Code and message of what ended the call, if it failed."""


def pack(parts: Sequence[Part]) -> bytes:
    """The parts as bytes."""
    return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> list[Part]:
    """The inverse of `pack`, for what `grok1` has sent: not for bytes from elsewhere."""
    parts: list[Part] = pickle.loads(packed)
    return parts


class Receiver:
    """The caller's end of one call. Not thread-safe, but for `ended` and `error`."""

    def __init__(self, take: Callable[[Values], None]) -> None:
        """Gets nothing yet.

        Args:
          take: gets the values of the events in order; of events that wait, merged.
        """
        self.ended = threading.Event()
        """Set once the last part was taken."""
        self.error: EngineError | None = None
        """What ended the call, if it failed."""
        self._take = take
        self._failed = False

    def receive(self, parts: Sequence[Part]) -> None:
        """Takes the next parts."""
        last = parts[-1]
        values = [part.values for part in parts if part.error is None]
        try:
            if values and not self._failed:
                self._take(merge(values))
            if last.error is not None and not self._failed:
                code, message = last.error
                self.error = EngineError(ErrorCode(code), message)
        except Exception as error:  # of this call alone; the thread works for all of them
            logger.exception("a response was not taken")
            self._failed = True
            self.error = EngineError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        if last.final:
            self.ended.set()
