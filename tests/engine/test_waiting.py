"""The order in which requests leave the queue."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.engine.waiting import LazyHeap, WaitingQueue


@dataclass(eq=False)
class Waiter:
    priority: int
    arrival: int


def drain(queue: WaitingQueue[Waiter]) -> list[int]:
    order = []
    while (first := queue.first()) is not None:
        queue.pop()
        order.append(first.arrival)
    return order


def test_higher_priorities_come_first_and_equal_ones_in_order() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    for arrival, priority in enumerate([0, 1, 0, 2, 1]):
        queue.push(Waiter(priority, arrival))
    assert drain(queue) == [3, 1, 4, 0, 2]


def test_one_that_returns_takes_its_old_place() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    waiters = [Waiter(0, arrival) for arrival in range(3)]
    for waiter in waiters:
        queue.push(waiter)
    queue.pop()
    queue.pop()
    queue.push(waiters[1])
    queue.push(waiters[0])
    assert drain(queue) == [0, 1, 2]


def test_a_low_priority_does_not_wait_for_ever() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    low = Waiter(-5, 0)
    queue.push(low)
    for arrival in range(1, 100):
        queue.push(Waiter(5, arrival))
        first = queue.first()
        queue.pop()
        if first is low:
            break
    assert arrival == WaitingQueue.FAIR_TURN


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "remove", "first"]), st.integers(0, 9), st.integers(0, 5)
        )
    )
)
def test_a_lazy_heap_is_a_dict_of_least_values(steps: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    values: dict[int, int] = {}
    for kind, item, key in steps:
        if kind == "push":
            heap.push(item, key, item)
            values[item] = key
        else:
            heap.remove(item)
            values.pop(item, None)
        expected = min(((key, item) for item, key in values.items()), default=None)
        assert heap.first() == expected
        assert len(heap) == len(values)
        assert (item in heap) == (item in values)


def test_removed_items_are_not_kept() -> None:
    heap: LazyHeap[object] = LazyHeap()
    items = [object() for _ in range(1000)]
    for key, item in enumerate(items):
        heap.push(item, key)
    for item in items:
        heap.remove(item)
    assert len(heap._heap) <= 8
