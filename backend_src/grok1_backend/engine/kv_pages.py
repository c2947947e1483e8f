"""Page accounting of the KV pool, all of it: who holds a page, and whose content can be reused.

A page is free, held (by one block table or by several that share it), or idle: held by none but
still found by its content. Idle pages are taken again, least recently used first, when the free
ones run out. Knows token ids and page numbers only; the KV itself is the runner's.

Content is found by a chain: an entry's key is the entry before it and the tokens of its own page,
compared as they are. So two prompts share pages only if all tokens up to there are equal, whatever
their hashes. A chain may end in an entry of less than a page, the tail; it has one holder at most,
who goes on writing to it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_ROOT = 0
_Key = tuple[int, bytes]


@dataclass(slots=True, eq=False)
class BlockTable:
    """The pages of one request, in the order of its positions."""

    pages: list[int] = field(default_factory=list)
    reused: int = 0
    """Positions whose KV was found, from the first on."""
    published: int = 0
    """Leading pages that have their entry in the chain."""
    entry: int = _ROOT
    """The chain's entry for the last of them."""


class KVPages:
    """The pool of pages. Not thread-safe."""

    def __init__(
        self, num_pages: int, page_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """All pages are free.

        Args:
          num_pages: pages of the pool, numbered from 0.
          page_size: positions in a page.
          clock: seconds, for `expire`.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self._clock = clock
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages
        self._idle: OrderedDict[int, float] = OrderedDict()  # page → since when, oldest first
        self._found: dict[_Key, int] = {}  # key → page
        self._keys: list[_Key | None] = [None] * num_pages  # page → its key
        self._entries = [_ROOT] * num_pages  # page → its entry; the numbers are never used again
        self._last_entry = _ROOT

    @property
    def available(self) -> int:
        """Pages that `extend` can give: the free and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages in at least one block table."""
        return self.num_pages - self.available

    @property
    def idle(self) -> int:
        """Pages kept for their content alone."""
        return len(self._idle)

    def reuse(self, tokens: NDArray[np.int32], limit: int, tail_end: int = 0) -> BlockTable:
        """A block table of the longest known beginning of `tokens`.

        Args:
          tokens: [n] of the whole request.
          limit: at most so many positions count as known.
          tail_end: where a tail may end that this request or its session left behind.

        Returns:
          A table to be released in the end. Its full pages may be shared: never write to the
          positions before `reused`.
        """
        table = BlockTable()
        size = self.page_size
        while (end := (table.published + 1) * size) <= limit:
            page = self._found.get((table.entry, tokens[end - size : end].tobytes()))
            if page is None:
                break
            self._take(table, page)
            table.published += 1
            table.entry = self._entries[page]
        start = table.published * size
        table.reused = start
        if start < tail_end < start + size and tail_end <= limit:
            page = self._found.get((table.entry, tokens[start:tail_end].tobytes()))
            if page is not None:
                self._take(table, page)
                self._unpublish(page)
                table.reused = tail_end
        return table

    def extend(self, table: BlockTable, length: int, spare: int = 0) -> bool:
        """Adds pages until the table covers `length` positions.

        Returns:
          False, with nothing added, if fewer than `spare` pages would be available afterwards.
        """
        missing = -(-length // self.page_size) - len(table.pages)
        if missing <= 0:
            return True
        if missing + spare > self.available:
            return False
        for _ in range(missing):
            if not self._free:
                self._evict()
            page = self._free.pop()
            self._holders[page] = 1
            table.pages.append(page)
        return True

    def publish(self, table: BlockTable, tokens: NDArray[np.int32], length: int) -> None:
        """Lets others find the table's full pages among the first `length` positions.

        The KV of these positions must be that of `tokens`, written or dispatched to be written.
        Where an equal page is known already the table's own stays private.
        """
        size = self.page_size
        while (end := (table.published + 1) * size) <= length:
            key = (table.entry, tokens[end - size : end].tobytes())
            page = self._found.get(key)
            if page is None:
                page = table.pages[table.published]
                self._enter(page, key)
            table.published += 1
            table.entry = self._entries[page]

    def release(
        self, table: BlockTable, tokens: NDArray[np.int32] | None = None, length: int = 0
    ) -> None:
        """Gives the table's pages back; what is published stays findable.

        Args:
          table: empty afterwards.
          tokens: given when the request may go on: its last, partly filled page is then kept for
            `reuse(tail_end=length)`.
          length: positions whose KV is that of `tokens`.
        """
        if tokens is not None:
            self.publish(table, tokens, length)
            start = table.published * self.page_size
            key = (table.entry, tokens[start:length].tobytes())
            if start < length and key not in self._found:
                self._enter(table.pages[table.published], key)
        for page in reversed(table.pages):  # so that a chain is evicted from its end
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = self._clock()
        table.pages = []
        table.published = table.reused = 0
        table.entry = _ROOT

    def forget(self, table: BlockTable) -> None:
        """Lets nobody find the table's pages any more: their content is not to be trusted."""
        for page in table.pages:
            self._unpublish(page)

    def expire(self, before: float) -> None:
        """Frees the pages that have been idle since before that time."""
        while self._idle and next(iter(self._idle.values())) < before:
            self._evict()

    def clear(self) -> None:
        """Forgets all content: idle pages become free, held ones are found no more."""
        while self._idle:
            self._evict()
        for page in list(self._found.values()):
            self._unpublish(page)

    def _take(self, table: BlockTable, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1
        table.pages.append(page)

    def _enter(self, page: int, key: _Key) -> None:
        self._last_entry += 1
        self._entries[page] = self._last_entry
        self._keys[page] = key
        self._found[key] = page

    def _unpublish(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._found[key]
            self._keys[page] = None

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        self._unpublish(page)
        self._free.append(page)
