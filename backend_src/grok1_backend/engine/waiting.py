"""Requests in order of service, and times in order of their coming.

Nothing here takes time in proportion to the number of waiting requests: entries that no longer
count stay in their heap until they reach its top or are more than the others together.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """What can wait: it has a priority (higher first) and the number of its arrival."""

    @property
    def priority(self) -> int: ...

    @property
    def arrival(self) -> int: ...


Item = TypeVar("Item")
WaiterType = TypeVar("WaiterType", bound=Waiter)


class LazyHeap(Generic[Item]):
    """A heap of (key, item) in which an item can be removed or given a new key."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Item]] = []
        self._serials: dict[Item, int] = {}  # item → serial of its only valid entry
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, item: Item) -> bool:
        return item in self._serials

    def push(self, item: Item, *key: float) -> None:
        """Adds the item, or moves it to its new key."""
        self._last_serial += 1
        self._serials[item] = self._last_serial
        heapq.heappush(self._heap, (key, self._last_serial, item))
        self._compact()

    def remove(self, item: Item) -> None:
        """Removes the item if it is here."""
        if self._serials.pop(item, None) is not None:
            self._compact()

    def first(self) -> tuple[float, Item] | None:
        """The least key's first part and its item, or None when empty."""
        while self._heap and not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        key, _, item = self._heap[0]
        return key[0], item

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._serials) + 8:
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)

    def _valid(self, entry: tuple[tuple[float, ...], int, Item]) -> bool:
        return self._serials.get(entry[2]) == entry[1]


class WaitingQueue(Generic[WaiterType]):
    """Higher priority first; first come, first served inside a priority; no starvation.

    Every eighth to leave is the one that came first of all, whatever its priority. So a request
    waits for at most eight times as many others as came before it.
    """

    FAIR_TURN = 8

    def __init__(self) -> None:
        self._by_rank: LazyHeap[WaiterType] = LazyHeap()
        self._by_age: LazyHeap[WaiterType] = LazyHeap()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, waiter: WaiterType) -> bool:
        return waiter in self._by_rank

    def push(self, waiter: WaiterType) -> None:
        """Adds a request; one that had left takes its old place."""
        self._by_rank.push(waiter, -waiter.priority, waiter.arrival)
        self._by_age.push(waiter, waiter.arrival)

    def first(self) -> WaiterType | None:
        """The request to be served next, or None when empty."""
        fair = self._turn == self.FAIR_TURN - 1
        entry = (self._by_age if fair else self._by_rank).first()
        return entry[1] if entry else None

    def pop(self) -> None:
        """Takes the first request out: it is served now."""
        waiter = self.first()
        if waiter is not None:
            self.remove(waiter)
            self._turn = (self._turn + 1) % self.FAIR_TURN

    def remove(self, waiter: WaiterType) -> None:
        """Takes a request out that is not to be served."""
        self._by_rank.remove(waiter)
        self._by_age.remove(waiter)
