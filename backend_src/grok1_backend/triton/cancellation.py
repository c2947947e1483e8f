"""Notices clients that have gone: asks for each open request a few times a second.

A model learns of it only by asking, and a request that waits in the queue sends nothing after
which it could ask.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from grok1_backend.triton.responses import ResponseStream

logger = logging.getLogger(__name__)

PERIOD = 0.2
"""Seconds between two rounds of questions: each costs a message to the server."""


class CancellationWatch:
    """One thread for all requests of a model."""

    def __init__(self) -> None:
        self._watched: dict[ResponseStream, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    def watch(self, stream: ResponseStream, cancel: Callable[[], object]) -> None:
        """Calls `cancel`, in every round until the stream ends, once its client has gone."""
        with self._lock:
            self._watched[stream] = cancel

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            with self._lock:
                self._watched = {s: cancel for s, cancel in self._watched.items() if s.open}
                watched = list(self._watched.items())
            for stream, cancel in watched:
                try:
                    if stream.cancelled():
                        cancel()
                except Exception:
                    logger.exception("a request could not be cancelled")
