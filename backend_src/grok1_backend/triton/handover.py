"""A thread that does what others must not wait for, and whatever has gathered at one time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Target = TypeVar("Target")
Item = TypeVar("Item")


class Handover(Generic[Target, Item]):
    """Takes items from any thread, and hands over all that wait, by their targets.

    So a target that is slow gets fewer and larger lots, and nothing piles up before it.
    """

    def __init__(self, name: str, work: Callable[[Mapping[Target, list[Item]]], None]) -> None:
        """Starts the thread.

        Args:
          name: of the thread.
          work: gets the items of each target, in the order in which they came.
        """
        self._work = work
        self._items: queue.SimpleQueue[tuple[Target, Item] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, target: Target, item: Item) -> None:
        """Hands an item over, soon."""
        self._items.put((target, item))

    def close(self) -> None:
        """Works off what is there and ends the thread."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        entry = self._items.get()
        while entry is not None:
            waiting: dict[Target, list[Item]] = {}
            try:
                while entry is not None:
                    target, item = entry
                    waiting.setdefault(target, []).append(item)
                    entry = self._items.get_nowait()
            except queue.Empty:
                pass
            try:
                self._work(waiting)
            except Exception:
                logger.exception("what was handed over is lost")
            if entry is not None:
                entry = self._items.get()
