"""The trigram baseline: a hand-computed example, and distributions that add up to 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training.kneser_ney import KneserNeyTrigram, _discounts

VOCAB = 4


def test_hand_example() -> None:
    # Too few counts for estimated discounts: 0.5, 1 and 1.5 for counts of 1, 2 and 3 or more.
    model = KneserNeyTrigram(np.array([1, 2, 3, 1, 2, 3, 1, 2, 0], np.int32), VOCAB)

    def probability(a: int, b: int, c: int) -> float:
        return float(model.probabilities(*(np.array([i]) for i in (a, b, c)))[0])

    # Every id follows one distinct id, so each unigram is (1 - 0.5)/4 + (4 · 0.5)/4 · 1/4 = 1/4.
    # After 2 come 3 and 0, each after one distinct id: P(3|2) = 0.5/2 + 1/2 · 1/4 = 0.375.
    # After 1 2 come 3 twice and 0 once: P(3|1 2) = (2 - 1)/3 + 1.5/3 · 0.375.
    assert probability(1, 2, 3) == pytest.approx(1 / 3 + 0.5 * 0.375)
    assert probability(1, 2, 0) == pytest.approx(0.5 / 3 + 0.5 * 0.375)
    assert probability(1, 2, 1) == pytest.approx(0.5 * 0.5 * 0.25)
    # 0 2 never occurred: the bigram decides. Nor did anything come after 0: the unigram.
    assert probability(0, 2, 3) == pytest.approx(0.375)
    assert probability(2, 0, 3) == pytest.approx(0.25)


def test_discounts_follow_the_counts_of_counts() -> None:
    counts = np.array([1] * 4 + [2] * 2 + [3] * 2 + [4] + [9])
    # y = 4/(4 + 2·2) = 0.5; 1 - 2y·2/4, 2 - 3y·2/2, 3 - 4y·1/2
    assert _discounts(counts) == pytest.approx([0.0, 0.5, 0.5, 2.0])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=200), st.data())
def test_every_context_has_a_distribution(ids: list[int], data: st.DataObject) -> None:
    model = KneserNeyTrigram(np.array(ids, np.int32), VOCAB)
    a, b = (data.draw(st.integers(0, VOCAB - 1)) for _ in range(2))
    probabilities = model.probabilities(
        np.full(VOCAB, a), np.full(VOCAB, b), np.arange(VOCAB, dtype=np.int64)
    )
    assert np.all(probabilities > 0)
    assert np.sum(probabilities) == pytest.approx(1)


def test_bits_are_those_of_the_ids_after_the_first_two() -> None:
    stream = np.array([1, 2, 3, 1, 2, 3, 1, 2, 0], np.int32)
    model = KneserNeyTrigram(stream, VOCAB)
    bits = model.bits(stream[:4])
    expected = model.probabilities(np.array([1, 2]), np.array([2, 3]), np.array([3, 1]))
    assert bits == pytest.approx(-np.log2(expected))
