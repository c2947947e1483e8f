"""How far a long read or write is: a callback, and lines of text for a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, by one thread at a time."""

_BAR_WIDTH = 20
_logger = logging.getLogger(__name__)


class ProgressLog:
    """Writes a line now and then: a bar, bytes, bytes per second, time left."""

    def __init__(
        self,
        what: str,
        write: Callable[[str], None] = _logger.info,
        *,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        what: begins each line ("loading parameters").
        write: takes a line without its end.
        interval: seconds between lines; the line at 100 % always comes.
        clock: seconds.
        """
        self._what = what
        self._write = write
        self._interval = interval
        self._clock = clock
        self._start = self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._last < self._interval:
            return
        self._last = now
        self._write(self._line(done, total, now - self._start))

    def _line(self, done: int, total: int, seconds: float) -> str:
        share = done / total if total else 1.0
        filled = int(share * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"{self._what} [{bar}] {share:4.0%} {_size(done)} of {_size(total)}"
        if seconds > 0 and done:
            rate = done / seconds
            line += f", {_size(rate)}/s"
            line += f", {_duration(seconds)}" if done >= total else ""
            line += f", {_duration((total - done) / rate)} left" if done < total else ""
        return line


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
