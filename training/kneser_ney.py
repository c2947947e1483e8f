"""The baseline: an interpolated Kneser-Ney trigram with modified discounts.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999),
section 3; the unigrams are interpolated with the uniform distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Order:
    """The counts of the n-grams of one order, sorted by key, and the weights of their contexts.

    An n-gram's key is its ids read as digits of base `vocab_size`; its context's key is that
    without the last digit.
    """

    keys: Ints  # [ngrams]
    discounted: Floats  # [ngrams] count less its discount
    contexts: Ints  # [contexts]
    totals: Floats  # [contexts] sum of the counts of the n-grams with this context
    reserved: Floats  # [contexts] sum of the discounts

    @classmethod
    def of(cls, keys: Ints, counts: Ints, vocab_size: int) -> _Order:
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        contexts, place = np.unique(keys // vocab_size, return_inverse=True)
        return cls(
            keys=keys,
            discounted=counts - discounts,
            contexts=contexts,
            totals=np.bincount(place, weights=counts).astype(np.float64),
            reserved=np.bincount(place, weights=discounts).astype(np.float64),
        )

    def interpolate(self, keys: Ints, vocab_size: int, lower: Floats) -> Floats:
        """Probabilities of the n-grams `keys` given those of their suffixes; [ngrams]."""
        context, known = _find(self.contexts, keys // vocab_size)
        ngram, seen = _find(self.keys, keys)
        mass = np.where(seen, self.discounted[ngram], 0.0) + self.reserved[context] * lower
        return np.where(known, mass / self.totals[context], lower)


class KneserNeyTrigram:
    """P(c | a, b) over ids below `vocab_size`."""

    def __init__(self, stream: npt.NDArray[np.int32], vocab_size: int) -> None:
        """Count a stream [tokens] of ids."""
        ids = stream.astype(np.int64)
        self._vocab_size = vocab_size
        grams, counts = np.unique(
            (ids[:-2] * vocab_size + ids[1:-1]) * vocab_size + ids[2:], return_counts=True
        )
        self._orders: list[_Order] = []  # trigrams first
        for order in (3, 2, 1):
            self._orders.append(_Order.of(grams, counts, vocab_size))
            # A lower order counts the distinct ids that come before it, not its occurrences.
            grams, counts = np.unique(grams % vocab_size ** (order - 1), return_counts=True)

    def probabilities(self, a: Ints, b: Ints, c: Ints) -> Floats:
        """P(c | a, b) for arrays of ids of the same shape [n]."""
        size = self._vocab_size
        result = np.full(c.shape, 1 / size)
        keys = (a.astype(np.int64) * size + b) * size + c
        for n, order in zip((1, 2, 3), reversed(self._orders), strict=True):
            result = order.interpolate(keys % size**n, size, result)
        return result

    def bits(self, stream: npt.NDArray[np.int32]) -> Floats:
        """-log2 P of each id of a stream but the first two, given the two before it."""
        ids = stream.astype(np.int64)
        return -np.log2(self.probabilities(ids[:-2], ids[1:-1], ids[2:]))


def _find(table: Ints, keys: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Where each key stands in a sorted table (anywhere if it does not), and whether it does."""
    place = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return place, table[place] == keys


def _discounts(counts: Ints) -> Floats:
    """The discounts of counts 0, 1, 2 and 3 or more; [4].

    From the counts of counts; where a small sample lacks one, the discount is half the count,
    which leaves a proper distribution.
    """
    n1, n2, n3, n4 = (int(np.sum(counts == n)) for n in (1, 2, 3, 4))
    if not (n1 and n2 and n3 and n4):
        return np.array([0.0, 0.5, 1.0, 1.5])
    y = n1 / (n1 + 2 * n2)
    return np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
