"""The books of `KVPages`, checked from outside."""

from __future__ import annotations

from collections.abc import Sequence

from grok1_backend.engine.kv_pages import BlockTable, KVPages


def assert_accounts(pages: KVPages, tables: Sequence[BlockTable]) -> None:
    """Every page is in one place, found by its own content only, and held by `tables` alone."""
    free, idle = set(pages._free), set(pages._idle)
    assert len(free) == len(pages._free), "a page is free twice"
    held = [page for table in tables for page in table.pages]
    for page in range(pages.num_pages):
        assert pages._holders[page] == held.count(page), f"page {page} leaks"
        places = (page in free) + (page in idle) + (page in held)
        assert places == 1, f"page {page} is in {places} places"
        key = pages._keys[page]
        assert key is None or pages._found[key] == page, f"page {page} is not found by its key"
        assert key is None or page not in free, f"page {page} is free and findable"
        assert key is not None or page not in idle, f"page {page} is idle and lost"
        tail = key is not None and len(key[1]) != 4 * pages.page_size
        assert not tail or page in idle, f"the tail {page} is held and findable"
    assert len(pages._found) == sum(key is not None for key in pages._keys)
    assert pages.held == len(set(held))
