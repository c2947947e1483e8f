"""How what `grok1` generates travels to the models that call it: a step's events in one response.

A response between models costs half a dozen switches between processes, whatever is in it. So the
events of all calls of one caller go together, as a response of any one of the calls; every call
still ends with its own final response. Responses of different calls are read by different threads:
each part says where in its call it belongs, and `Receiver` puts them in order.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.interface import Values
from grok1_backend.triton.outputs import merge

logger = logging.getLogger(__name__)


class CallName(NamedTuple):
    """How the input `internal` names a call: `caller/number`."""

    caller: str
    number: str

    @classmethod
    def parse(cls, text: str) -> CallName:
        """The name from its text."""
        caller, _, number = text.partition("/")
        return cls(caller, number)

    def __str__(self) -> str:
        return f"{self.caller}/{self.number}"


class Part(NamedTuple):
    """One event of one call."""

    number: str
    """The caller's, of the call."""
    start: int
    """How many tokens of the call came before this event."""
    tokens: int
    """How many tokens the event has; only the last one may have none."""
    values: Values
    """Of the outputs that the caller asked for."""
    final: bool = False
    error: tuple[str, str] | None = None
    """Code and message of what ended the call, if it failed."""


def pack(parts: Sequence[Part]) -> bytes:
    """The parts as the value of a tensor."""
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
        self._next = 0
        self._early: dict[int, Part] = {}  # by their start
        self._failed = False

    def receive(self, parts: Iterable[Part]) -> None:
        """Takes those of the parts, and of the ones that came too early before, that are due."""
        self._early |= {part.start: part for part in parts}
        values: list[Values] = []
        ends = False
        while not ends and (part := self._early.pop(self._next, None)) is not None:
            self._next += part.tokens
            ends = part.final
            if part.error is None:
                values.append(part.values)
            elif self.error is None:
                code, message = part.error
                self.error = EngineError(ErrorCode(code), message)
        try:
            if values and not self._failed:
                self._take(merge(values))
        except Exception as error:  # of this call alone; the thread works for all of them
            logger.exception("a response was not taken")
            self._failed = True
            self.error = EngineError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        if ends:
            self.ended.set()
