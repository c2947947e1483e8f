"""Sessions: the token history of each open sequence, and the order of its turns.

A session holds no pages. When a turn ends its KV stays in the prefix cache, the partly filled last
page included, and the next turn finds it there; if it was evicted in between, the next turn's
prefill computes it from the history, and the client sees no difference.

What a session holds after a turn: its history before, the turn's prompt, and every output token
that was streamed (an end token and the tokens of a stop word too, though their text is not shown):
the token ids of all prompts and all events, joined. That is so for a cancelled or failed turn
too, unless it had no output yet: then the session is as if the turn had never been sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import SessionTurn

if TYPE_CHECKING:
    from grok1_backend.engine.generation import Generation

CorrelationId = int | str


class Session:
    """One sequence: its history so far and its unfinished turns, the first of them at work."""

    def __init__(self, key: CorrelationId) -> None:
        self.key = key
        self.history: NDArray[np.int32] = np.empty(0, np.int32)
        self.tail_end = 0
        """Positions of the history whose KV its last turn left in the prefix cache."""
        self.turns: deque[Generation] = deque()
        self.used_at = 0.0

    def keep(self, tokens: NDArray[np.int32], tail_end: int) -> None:
        """Takes over the history that a turn leaves, and how far its KV goes."""
        self.history, self.tail_end = tokens.copy(), tail_end


class Sessions:
    """The open sessions by correlation id. Not thread-safe: the engine's lock guards it."""

    def __init__(self, max_sessions: int, lifetime: float) -> None:
        """No session is open.

        Args:
          max_sessions: open at one time.
          lifetime: seconds without a turn after which a session is closed.
        """
        self._max_sessions = max_sessions
        self._lifetime = lifetime
        self._open: OrderedDict[CorrelationId, Session] = OrderedDict()  # least recently used first
        self.num_queued = 0
        """Turns that wait for an earlier turn of their session."""

    def __len__(self) -> int:
        return len(self._open)

    def find(self, turn: SessionTurn) -> Session:
        """The session that the turn belongs to; a new one, not open yet, for START.

        START closes an open session of that id, END the one it belongs to, even if the turn is
        refused later, as Triton has no way to send it again. Unfinished turns of a closed session
        go on, on their own.

        Raises:
          EngineError: NOT_FOUND for an unknown session, UNAVAILABLE if too many are open.
        """
        key = turn.correlation_id
        session = self._open.get(key)
        if session is not None and (turn.start or turn.end):
            del self._open[key]
        if turn.start:
            if len(self._open) >= self._max_sessions and not turn.end:
                message = f"session {key!r} is not opened: {self._max_sessions} are open, the limit"
                raise EngineError(ErrorCode.UNAVAILABLE, message)
            return Session(key)
        if session is None:
            message = (
                f"session {key!r} is unknown: never started, ended, or without a turn for "
                f"{self._lifetime:g} s; the first turn of a session needs START"
            )
            raise EngineError(ErrorCode.NOT_FOUND, message)
        return session

    def enqueue(self, generation: Generation, now: float) -> bool:
        """Adds a turn to its session; returns whether it is the first and may start."""
        session, turn = generation.session, generation.request.session
        if session is None or turn is None:
            return True
        if turn.start and not turn.end:
            self._open[session.key] = session
        self._touch(session, now)
        session.turns.append(generation)
        if len(session.turns) == 1:
            return True
        self.num_queued += 1
        return False

    def leave(self, generation: Generation, now: float) -> Generation | None:
        """Takes a finished turn out; returns the turn that may start now, if any."""
        session = generation.session
        if session is None:
            return None
        self._touch(session, now)
        if session.turns[0] is not generation:
            session.turns.remove(generation)
            self.num_queued -= 1
            return None
        session.turns.popleft()
        if not session.turns:
            return None
        self.num_queued -= 1
        return session.turns[0]

    def close(self, correlation_id: CorrelationId) -> bool:
        """Closes a session; its unfinished turns go on. Returns whether it was open."""
        return self._open.pop(correlation_id, None) is not None

    def expire(self, now: float) -> None:
        """Closes the sessions that had no turn for a lifetime."""
        while self._open:
            session = next(iter(self._open.values()))
            if session.used_at + self._lifetime > now:
                break
            if session.turns:
                self._touch(session, now)
            else:
                del self._open[session.key]

    def _touch(self, session: Session, now: float) -> None:
        session.used_at = now
        if self._open.get(session.key) is session:
            self._open.move_to_end(session.key)
