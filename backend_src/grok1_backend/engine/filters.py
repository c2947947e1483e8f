"""Which tokens of a row may be drawn: top-k, top-p and min-p, without sorting the vocabulary.

Thresholds are on the *gap* of a token: how far its logit is below the best one, in temperatures.
Gaps are exact in float32 (one subtraction, one division), so tokens with equal logits have equal
gaps and stay together; the bits of floats >= 0, read as integers, are in the floats' order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from grok1_backend.kernels import choice

if TYPE_CHECKING:
    from grok1_backend.kernels.gpu.rows import Sum

FOLD = 16
"""A row is summed by folding it: numbers V / 16 apart are added first, in V / 16 sums that fill the
vector units. One sum in the order of the ids does not, nor one that XLA finds long enough to split
in its own way (over 32)."""

BLOCK = 32
"""Tokens a block in the search for the best ones: only the blocks with the best maxima matter."""

CANDIDATES = 128
"""Best tokens found in order. A threshold of top-k or top-p among them is read off; one beyond
them is searched over the whole row."""

WEIGHTLESS = 104.0
"""exp(-104) is 0 in float32: tokens with larger gaps are never drawn."""

Sums = Callable[[Callable[[Array, Array], Array]], Array]
"""Sums over rows, [B], a function of their tokens' gaps and weights, [B, V] each."""

Bounds = tuple[Array, Array, Array, Array]
"""Bits of a gap below the threshold and of one not below it, and the totals up to them."""


Weigh = Callable[[Array], Array]
"""From logits to weights, [B, n] → [B, n] float32: proportional to the probabilities, 0 for tokens
that are filtered out. A function, so that the weights of a whole row need never be stored."""


def weigh_by(best: Array, temperature: Array) -> Weigh:
    """Weights without filters; `best` is the best logit of each row, both are [B]."""
    return lambda logits: jnp.exp(-_gaps(logits, best, temperature))


def filter_by(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> tuple[Array, Weigh]:
    """The best token of each row ([B] int32), and what weighs tokens of it; settings are [B]."""
    best_logits, best_ids = top(logits, CANDIDATES)
    best = best_logits[:, 0]
    candidates = _gaps(best_logits, best, temperature)

    def gaps() -> Array:
        return _gaps(logits, best, temperature)

    threshold = _threshold(gaps, logits.shape[1], candidates, top_k, top_p)

    def weigh(logits: Array) -> Array:
        gaps = _gaps(logits, best, temperature)
        weights = jnp.exp(-gaps)
        return jnp.where((gaps <= threshold[:, None]) & (weights >= min_p[:, None]), weights, 0.0)

    return best_ids[:, 0], weigh


def top(logits: Array, count: int) -> tuple[Array, Array]:
    """The best of each row, best first and lowest id first among ties: values and ids.

    The best n tokens lie in the n blocks with the best maxima, so that only those are sorted.

    Args:
      logits: [B, V].

    Returns:
      [B, min(count, V)] of the logits' type, and int32.
    """
    size = logits.shape[1]
    count = min(count, size)
    if size <= count * BLOCK:
        return fenced_top_k(logits, count)
    padded = jnp.pad(logits, ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(padded.shape[0], -1, BLOCK)
    _, chosen = fenced_top_k(blocks.max(axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # so that the lowest id comes first among ties
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    values, index = fenced_top_k(inside.reshape(inside.shape[0], -1), count)
    ids = jnp.take_along_axis(chosen, index // BLOCK, axis=1) * BLOCK + index % BLOCK
    return values, jnp.minimum(ids, size - 1)


def fenced_top_k(values: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k`, fenced off: merged with a caller's `[:, 0]`, XLA compiles it as a full sort."""
    best, index = lax.top_k(values, count)
    # One barrier each: on several devices one around both ends XLA of JAX 0.7.1 in a failed check.
    return lax.optimization_barrier(best), lax.optimization_barrier(index)


def _gaps(logits: Array, best: Array, temperature: Array) -> Array:
    """[B, n] >= 0: how far each logit is below the best ([B]), in temperatures ([B])."""
    warm = jnp.where(temperature == 0, 1.0, temperature)
    return (best[:, None] - logits) / warm[:, None]


def _threshold(
    gaps: Callable[[], Array], size: int, candidates: Array, top_k: Array, top_p: Array
) -> Array:
    """[B]: the largest gap that top-k and top-p keep.

    On GPU a predicate would be read by the host: what is seldom needed is computed always if it is
    cheap, and else in a kernel, in which a row that does not need it ends at once.

    Args:
      gaps: of all tokens, [B, V]; a function, to be called in branches that are seldom taken.
      size: V.
      candidates: [B, n]: the smallest gaps, in order.
    """

    def of_all() -> Array:
        return row_sum(jnp.exp(-gaps()))

    last, each_row = candidates[:, -1], choice.for_each_row()
    if each_row is not None:
        near, found = _near_threshold(candidates, of_all(), top_k, top_p)
        search_row = functools.partial(_search_row, size)
        return jnp.where(found, near, each_row(search_row, gaps(), ~found, last, top_k, top_p))

    some_of_all = ((top_p < 1.0) & (top_k <= 0)).any()
    total = lax.cond(some_of_all, of_all, lambda: jnp.zeros_like(top_p))
    near, found = _near_threshold(candidates, total, top_k, top_p)

    def search() -> Array:
        far = _search(_sums(gaps()), size, ~found, last, top_k, top_p)
        return jnp.where(found, near, far)

    threshold: Array = lax.cond(found.all(), lambda: near, search)
    return threshold


def _near_threshold(
    candidates: Array, total: Array, top_k: Array, top_p: Array
) -> tuple[Array, Array]:
    """The threshold, and whether the candidates alone determine it ([B] bool).

    `total` ([B]) is the weight of all tokens, of rows that limit p but not k.
    """
    count = candidates.shape[1]
    limits_k, limits_p = top_k > 0, top_p < 1.0
    kth = jnp.take_along_axis(candidates, jnp.clip(top_k, 1, count)[:, None] - 1, axis=1)[:, 0]
    by_k = jnp.where(limits_k, kth, jnp.inf)
    # All that tie with the k-th must be among the candidates: the last one is worse.
    found_k = ~limits_k | ((top_k <= count) & (candidates[:, -1] > by_k))
    kept = jnp.where(candidates <= by_k[:, None], jnp.exp(-candidates), 0.0)
    target = top_p * jnp.where(limits_k, kept.sum(axis=1), total)
    before = jnp.cumsum(kept, axis=1) - kept
    enough = before >= target[:, None]
    by_p = jnp.where(enough, 0.0, candidates).max(axis=1)
    found_p = ~limits_p | limits_k | enough[:, -1]
    return jnp.minimum(by_k, jnp.where(limits_p, by_p, jnp.inf)), found_k & found_p


def _sums(gaps: Array) -> Sums:
    """Sums over rows with gaps [B, V]."""
    gaps = lax.optimization_barrier(gaps)  # else computed anew for each limit
    weights = lax.optimization_barrier(jnp.exp(-gaps))
    return lambda function: row_sum(function(gaps, weights))


def _search_row(size: int, total: Sum, last: Array, top_k: Array, top_p: Array) -> Array:
    """`_search` in a kernel, for the one row whose gaps `total` sums."""

    def sums(function: Callable[[Array, Array], Array]) -> Array:
        return total(lambda gaps: function(gaps, jnp.exp(-gaps)))

    return _search(sums, size, jnp.bool_(True), last, top_k, top_p)


def _search(sums: Sums, size: int, wanted: Array, last: Array, top_k: Array, top_p: Array) -> Array:
    """The threshold of the `wanted` rows by bisection over all their tokens.

    Args:
      size: tokens of a row.
      wanted: [B] bool; in a kernel, for one row, it and the others are [].
      last: the gap of the last candidate.
    """

    def count(limit: Array) -> Array:
        return sums(lambda gaps, _: jnp.where(gaps <= limit[..., None], 1.0, 0.0))

    def mass(limit: Array) -> Array:
        return sums(lambda gaps, weights: jnp.where(gaps <= limit[..., None], weights, 0.0))

    wanted_k, wanted_p = wanted & (top_k > 0), wanted & (top_p < 1.0)
    all_tokens = jnp.full(top_k.shape, size, jnp.float32)
    by_k = _least(count, jnp.ones_like, top_k.astype(jnp.float32), all_tokens, last, wanted_k)
    kept = mass(by_k)
    by_p = _least(mass, lambda gap: jnp.exp(-gap), top_p * kept, kept, last, wanted_p)
    return jnp.minimum(by_k, by_p)


def _least(
    total: Callable[[Array], Array],
    least_of_one: Callable[[Array], Array],
    target: Array,
    total_all: Array,
    guess: Array,
    wanted: Array,
) -> Array:
    """A gap that keeps the tokens of the least gap up to which their total reaches the target.

    Each row ends when only one token is left between its bounds, so that how long other rows
    take does not matter to it. All arrays are [B], all functions from [B] to [B].

    Args:
      total: of the tokens up to a gap; monotone, as a sum in fixed order of numbers >= 0 is.
      least_of_one: the least that one token up to a gap adds to the total.
      total_all: the total of all tokens.
      guess: a gap that the answer is likely not below.
      wanted: rows to search; the others' answer is infinity.
    """

    def is_open(bounds: Bounds) -> Array:
        low, high, total_low, total_high = bounds
        several = total_high - total_low > 1.5 * least_of_one(_from_bits(high))
        return wanted & several & (high - low > 1)

    def some_are_open(bounds: Bounds) -> Array:
        rows = is_open(bounds)
        return rows.any() if rows.ndim else rows  # Triton's compiler knows no `any`

    def halve(bounds: Bounds) -> Bounds:
        low, high, total_low, total_high = bounds
        middle = low + (high - low) // 2
        total_middle = total(_from_bits(middle))
        above = total_middle < target
        up, down = is_open(bounds) & above, is_open(bounds) & ~above
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, total_middle, total_low),
            jnp.where(down, total_middle, total_high),
        )

    just_below = _to_bits(guess) - 1
    total_below = total(_from_bits(just_below))
    good = total_below < target
    low, total_low = jnp.where(good, just_below, -1), jnp.where(good, total_below, 0.0)
    high = jnp.full_like(low, np.float32(WEIGHTLESS).view(np.int32))
    bounds = lax.while_loop(some_are_open, halve, (low, high, total_low, total_all))
    return jnp.where(wanted, _from_bits(bounds[1]), jnp.inf)


def _to_bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _from_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def fold(values: Array) -> Array:
    """[B, n] → [B, ceil(n / FOLD)]: entry j is the sum of those at j, j + ceil(n / FOLD), …"""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % FOLD)))
    # The barrier keeps XLA from merging this sum with one over the result.
    sums = padded.reshape(values.shape[0], FOLD, -1).sum(axis=1)
    fenced: Array = lax.optimization_barrier(sums)
    return fenced


def row_sum(values: Array) -> Array:
    """[B, n] → [B]."""
    return fold(values).sum(axis=1)
