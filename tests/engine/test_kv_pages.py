"""Page accounting: no page is lost, held twice by mistake, or given away while it is used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray
from page_accounts import assert_accounts

from grok1_backend.engine.kv_pages import BlockTable, KVPages

SIZE = 4


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def test_pages_grow_with_tokens() -> None:
    pages = KVPages(16, SIZE)
    table = BlockTable()
    for length in range(1, 30):
        assert pages.extend(table, length)
        assert pages.held == len(table.pages) == -(-length // SIZE)


def test_extend_takes_nothing_when_it_cannot_take_all() -> None:
    pages = KVPages(3, SIZE)
    table = BlockTable()
    assert not pages.extend(table, 4 * SIZE)
    assert not pages.extend(table, 2 * SIZE, spare=2)
    assert pages.held == 0
    assert pages.extend(table, 2 * SIZE, spare=1)


def test_a_common_prefix_is_shared_in_full_pages() -> None:
    pages = KVPages(8, SIZE)
    text = tokens(*range(10))
    first = BlockTable()
    pages.extend(first, 10)
    pages.publish(first, text, 10)
    second = pages.reuse(text, 9)
    assert second.reused == 2 * SIZE
    assert second.pages == first.pages[:2]
    other = pages.reuse(tokens(0, 1, 2, 3, 9, 9, 9, 9, 9), 8)
    assert other.pages == first.pages[:1]
    assert pages.held == 3


def test_the_last_token_is_never_reused() -> None:
    pages = KVPages(8, SIZE)
    text = tokens(*range(8))
    table = BlockTable()
    pages.extend(table, 8)
    pages.publish(table, text, 8)
    assert pages.reuse(text, 7).reused == SIZE


def test_equal_pages_after_different_ones_are_not_mixed_up() -> None:
    pages = KVPages(8, SIZE)
    table = BlockTable()
    pages.extend(table, 8)
    pages.publish(table, tokens(1, 1, 1, 1, 2, 2, 2, 2), 8)
    assert pages.reuse(tokens(2, 2, 2, 2, 2, 2, 2, 2), 8).reused == 0
    assert pages.reuse(tokens(1, 1, 1, 1, 1, 1, 1, 1), 8).reused == SIZE


class Colliding(bytes):
    """Bytes whose hash says nothing."""

    def __hash__(self) -> int:
        return 1


class CollidingTokens(np.ndarray):
    def tobytes(self) -> Colliding:  # type: ignore[override]
        return Colliding(super().tobytes())


def test_a_hash_collision_does_not_mix_prompts() -> None:
    pages = KVPages(8, SIZE)
    texts = [tokens(i, i, i, i).view(CollidingTokens) for i in (1, 2)]
    for text in texts:
        table = BlockTable()
        pages.extend(table, SIZE)
        pages.publish(table, text, SIZE)
    assert [pages.reuse(text, SIZE).pages for text in texts] == [[7], [6]]


def test_a_tail_is_continued_by_one_only() -> None:
    pages = KVPages(8, SIZE)
    text = tokens(*range(7))
    table = BlockTable()
    pages.extend(table, 7)
    tail = table.pages[1]
    pages.release(table, text, 6)
    assert pages.held == 0
    assert pages.idle == 2
    first = pages.reuse(text, 6, tail_end=6)
    second = pages.reuse(text, 6, tail_end=6)
    assert first.reused == 6
    assert first.pages[1] == tail
    assert second.reused == SIZE


def test_the_least_recently_used_page_is_evicted_first_and_a_chain_from_its_end() -> None:
    pages = KVPages(4, SIZE)
    old, new = tokens(*range(8)), tokens(*range(20, 28))
    for text in (old, new):
        table = BlockTable()
        pages.extend(table, 8)
        pages.publish(table, text, 8)
        pages.release(table)
    pages.release(pages.reuse(old, 8))  # now `new` is the older one
    table = BlockTable()
    pages.extend(table, SIZE)
    assert pages.reuse(new, 8).reused == SIZE
    assert pages.reuse(old, 8).reused == 2 * SIZE


def test_idle_pages_expire() -> None:
    now = [0.0]
    pages = KVPages(4, SIZE, lambda: now[0])
    for at, text in ((1.0, tokens(1, 1, 1, 1)), (2.0, tokens(2, 2, 2, 2))):
        now[0] = at
        table = BlockTable()
        pages.extend(table, SIZE)
        pages.publish(table, text, SIZE)
        pages.release(table)
    pages.expire(before=2.0)
    assert pages.idle == 1
    assert pages.reuse(tokens(2, 2, 2, 2), SIZE).reused == SIZE


def test_forgotten_content_is_not_found() -> None:
    pages = KVPages(4, SIZE)
    text = tokens(*range(8))
    table = BlockTable()
    pages.extend(table, 8)
    pages.publish(table, text, 8)
    pages.forget(table)
    assert pages.reuse(text, 8).reused == 0
    pages.release(table)
    assert pages.idle == 0


@dataclass(eq=False)
class Holder:
    """A request: its tokens, its pages, and how many positions it has written."""

    text: NDArray[np.int32]
    table: BlockTable
    written: int
    tail_end: int = 0


class PageAccounting(RuleBasedStateMachine):
    """Random admissions, growth, forks, preemptions, resumptions and endings in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pages = KVPages(10, SIZE, lambda: self.now)
        self.content = np.full((10, SIZE), -1, np.int32)  # what the device would hold
        self.holders: list[Holder] = []
        self.left: list[Holder] = []  # preempted, or a session between two turns

    def admit_text(self, text: NDArray[np.int32], tail_end: int) -> None:
        table = self.pages.reuse(text, len(text) - 1, tail_end)
        holder = Holder(text, table, table.reused)
        self.holders.append(holder)
        if not self.pages.extend(table, len(text)):
            self.leave(holder)

    def leave(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.pages.release(holder.table, holder.text, holder.written)
        holder.tail_end = holder.written
        self.left.append(holder)

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, text: list[int]) -> None:
        self.admit_text(tokens(*text), 0)

    @precondition(lambda self: self.left)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def resume(self, data: st.DataObject, more: list[int]) -> None:
        holder = self.left.pop(data.draw(st.integers(0, len(self.left) - 1)))
        self.admit_text(np.append(holder.text, tokens(*more)).astype(np.int32), holder.tail_end)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 9))
    def write(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        end = min(holder.written + count, len(holder.text))
        for position in range(holder.written, end):
            page = holder.table.pages[position // SIZE]
            users = [h for h in self.holders if page in h.table.pages]
            assert users == [holder], "a page that is written to is shared"
            self.content[page, position % SIZE] = holder.text[position]
        holder.written = end
        self.pages.publish(holder.table, holder.text, end)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if self.pages.extend(holder.table, len(holder.text) + 1):
            holder.text = np.append(holder.text, np.int32(token))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.admit_text(holder.text.copy(), 0)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), resumable=st.booleans())
    def end(self, data: st.DataObject, resumable: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if resumable:
            self.leave(holder)
        else:
            self.holders.remove(holder)
            self.pages.release(holder.table)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pages.forget(holder.table)
        self.holders.remove(holder)
        self.pages.release(holder.table)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pages.expire(self.now - 5)

    @rule()
    def clear(self) -> None:
        self.pages.clear()

    @invariant()
    def accounts_are_right(self) -> None:
        assert_accounts(self.pages, [holder.table for holder in self.holders])

    @invariant()
    def every_holder_sees_its_own_text(self) -> None:
        for holder in self.holders:
            seen = self.content[holder.table.pages].reshape(-1)[: holder.written]
            assert seen.tolist() == holder.text[: holder.written].tolist()

    def teardown(self) -> None:
        for holder in self.holders:
            self.pages.release(holder.table)
        self.pages.clear()
        assert self.pages.available == len(self.pages._free) == 10


TestPageAccounting = PageAccounting.TestCase
TestPageAccounting.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
