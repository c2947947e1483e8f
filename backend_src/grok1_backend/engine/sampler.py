"""Chooses the next token of each row on the device, and moves its slot's state on.

Order: penalties and bias, bad words and end ids, temperature, top-k, top-p, min-p, draw.
Every row is computed from its own logits and settings alone: neighbours change no bit of it.

Definitions, where practice differs:
* Log-probabilities and the top 8 are those of the model: log-softmax of the logits as they came,
  before penalties, bias, bans, temperature and filters.
* top-k keeps every token tied with the k-th best; top-p keeps a token when all tokens better than
  it (not tied) hold less than p of the mass that top-k left, so ties stay together there too;
  min-p keeps tokens at least min_p times as likely as the best.
* argmax takes the lowest id among ties.
* Bans (bad words, end ids before min_tokens) that leave no token are not applied at that step.
* A token below about 1e-38 of the best one's probability is never drawn.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from grok1_backend.engine.decode_state import DecodeState, drop_padding
from grok1_backend.engine.requests import TOP_TOKENS, SamplingParams

COLUMNS = 256
"""A row of V numbers is reduced as [V / 256, 256], downwards first: 256 independent sums fill the
vector units, which one sum over V, whose order is fixed, does not."""

BLOCK = 64
"""Tokens a block in the search for the best ones: only the blocks with the best maxima matter."""

CANDIDATES = 128
"""Best tokens found in order. A threshold of top-k or top-p among them is read off; one beyond
them is searched over the whole row."""


class Variant(enum.IntEnum):
    """How much a step's executable can do; a later one can do all that an earlier one can."""

    GREEDY = 0
    """argmax of the logits as they come."""
    PLAIN = 1
    """Draws at a temperature too."""
    FULL = 2
    """Edits and filters too."""

    @classmethod
    def of(cls, params: SamplingParams) -> Variant:
        """The least variant that serves a request; a step needs the largest of its rows'."""
        if params.edits_logits or params.filters:
            return cls.FULL
        return cls.GREEDY if params.greedy else cls.PLAIN


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """What a step brings back to the host; B rows."""

    ids: Array
    """[B] int32: the chosen tokens; inside the vocabulary whatever the logits held."""
    log_probs: Array
    """[B] float32: of the chosen tokens."""
    top_ids: Array
    """[B, TOP_TOKENS] int32: the most likely tokens, best first, lowest id first among ties."""
    top_log_probs: Array
    """[B, TOP_TOKENS] float32."""
    finite: Array
    """[B] bool: False where the row's logits held NaN or infinity; the rest of that row is
    meaningless then."""


def sample(
    state: DecodeState,
    logits: Array,
    slots: Array,
    advance: Array,
    variant: Variant,
    axis_name: str | None = None,
) -> tuple[DecodeState, SampleOutput]:
    """One token for each row.

    Args:
      state: the slots' state; donate it.
      logits: [B, V] float32; inside `shard_map` with `axis_name`, this device's [B, V / devices].
      slots: [B] int32: the row's slot, `state.num_slots` (the scratch row) for padding rows.
      advance: [B] bool: False for rows whose token is not wanted, padding rows among them: their
        slot stays as it is.
      variant: static.
      axis_name: the mesh axis over which the vocabulary is sharded; state and results are
        replicated over it (which `shard_map` cannot infer: use `check_vma=False`).
    """
    model = _model_choice(logits, axis_name)
    if variant is Variant.GREEDY:
        ids, log_probs = model.ids[:, 0], model.log_probs[:, 0]
    else:
        if axis_name is not None:
            logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)
        if variant is Variant.FULL:
            best, weights = _edited_weights(state, logits, slots)
        else:
            temperature = state.temperature[slots]
            best = model.ids[:, 0]
            weights = jnp.exp(-_gaps(logits, model.logits[:, 0], temperature))
        drawn = draw(weights, _keys(state.seed[slots], state.length[slots]))
        ids = jnp.where(state.temperature[slots] == 0, best, drawn)
        chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
        log_probs = chosen - model.log_normalizer
    output = SampleOutput(
        ids=ids,
        log_probs=log_probs,
        top_ids=model.ids,
        top_log_probs=model.log_probs,
        finite=model.finite,
    )
    return _advance(state, slots, advance, ids, variant), output


def filtered_weights(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> tuple[Array, Array]:
    """The best token of each row and the weights to draw by: all settings are [B].

    Returns:
      [B] int32 argmax; [B, V] float32 proportional to the probabilities, 0 where filtered out.
    """
    best_logits, best_ids = top(logits, CANDIDATES)
    gaps = _gaps(logits, best_logits[:, 0], temperature)
    weights = lax.optimization_barrier(jnp.exp(-gaps))  # else computed anew for each use
    candidates = _gaps(best_logits, best_logits[:, 0], temperature)
    threshold = _threshold(gaps, weights, candidates, top_k, top_p)
    keep = (gaps <= threshold[:, None]) & (weights >= min_p[:, None])
    return best_ids[:, 0], jnp.where(keep, weights, 0.0)


def draw(weights: Array, keys: Array) -> Array:
    """Draws an index of each row, with probability proportional to its weight.

    An exponential race, in which arrival i comes at Exp(1) / weight i, in two heats: among the
    sums of the columns, then inside the winning one. Unlike the inverse of a cumulative sum it
    has no rounding by which a small weight is lost or a zero one drawn.

    Args:
      weights: [B, V] float32 >= 0, one of a row above 0. An index of weight 0 is never drawn.
      keys: [B] typed threefry keys.

    Returns:
      [B] int32.
    """
    columns = _columns(weights)
    rows = columns.shape[1]
    noise = jax.vmap(lambda key: _exponentials(key, COLUMNS + rows))(keys)
    column = _race(noise[:, :COLUMNS], columns.sum(axis=1))
    inside = jnp.take_along_axis(columns, column[:, None, None], axis=2)[:, :, 0]
    row = _race(noise[:, COLUMNS:], inside)
    return jnp.minimum(row * COLUMNS + column, weights.shape[1] - 1)


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
        return _top_k(logits, count)
    padded = jnp.pad(logits, ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(padded.shape[0], -1, BLOCK)
    _, chosen = _top_k(blocks.max(axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # so that the lowest id comes first among ties
    inside = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    values, index = _top_k(inside.reshape(inside.shape[0], -1), count)
    ids = jnp.take_along_axis(chosen, index // BLOCK, axis=1) * BLOCK + index % BLOCK
    return values, jnp.minimum(ids, size - 1)


def _top_k(values: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k`, fenced off: merged with a caller's `[:, 0]`, XLA compiles it as a full sort."""
    best, index = lax.top_k(values, count)
    # One barrier each: on several devices one around both ends XLA of JAX 0.7.1 in a failed check.
    return lax.optimization_barrier(best), lax.optimization_barrier(index)


@dataclass(frozen=True, kw_only=True)
class _ModelChoice:
    """What the model itself says, whatever the request's settings."""

    ids: Array  # [B, TOP_TOKENS] int32
    logits: Array  # [B, TOP_TOKENS]
    log_normalizer: Array  # [B]: log of the sum of exp(logits)
    finite: Array  # [B] bool

    @property
    def log_probs(self) -> Array:
        return self.logits - self.log_normalizer[:, None]


def _model_choice(logits: Array, axis_name: str | None) -> _ModelChoice:
    best, ids = top(logits, TOP_TOKENS)
    total = _column_sum(jnp.exp(logits - best[:, :1]))
    finite = jnp.isfinite(_columns(logits)).all(axis=1).all(axis=1)
    if axis_name is not None:
        # One collective for all, of [devices, B, 2 * TOP_TOKENS + 2] float32, in which token ids
        # (below 2**24) are exact.
        ids = ids + lax.axis_index(axis_name) * logits.shape[1]
        packed = jnp.concatenate(
            [best, ids.astype(jnp.float32), total[:, None], finite[:, None].astype(jnp.float32)],
            axis=1,
        )
        parts = lax.all_gather(packed, axis_name)
        bests, all_ids = parts[:, :, :TOP_TOKENS], parts[:, :, TOP_TOKENS : 2 * TOP_TOKENS]
        best, index = _top_k(_rows_of_parts(bests), TOP_TOKENS)
        ids = jnp.take_along_axis(_rows_of_parts(all_ids), index, axis=1).astype(jnp.int32)
        total = (parts[:, :, -2] * jnp.exp(bests[:, :, 0] - best[:, 0])).sum(axis=0)
        finite = (parts[:, :, -1] > 0).all(axis=0)
    log_normalizer = best[:, 0] + jnp.log(total)
    return _ModelChoice(ids=ids, logits=best, log_normalizer=log_normalizer, finite=finite)


def _rows_of_parts(parts: Array) -> Array:
    """[devices, B, n] → [B, devices * n]."""
    return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)


def _edited_weights(state: DecodeState, logits: Array, slots: Array) -> tuple[Array, Array]:
    return filtered_weights(
        _edit(state, logits, slots),
        state.temperature[slots],
        state.top_k[slots],
        state.top_p[slots],
        state.min_p[slots],
    )


def _edit(state: DecodeState, logits: Array, slots: Array) -> Array:
    """[B, V] → [B, V]: penalties and bias, then bans, for the rows whose slot asks for them."""

    def of(field: Array) -> Array:
        return field[slots][:, None]

    counts = state.output_counts[slots]
    seen = (counts > 0) | state.in_prompt[slots]
    penalty = of(state.repetition_penalty)
    edited = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    edited -= of(state.frequency_penalty) * counts
    edited -= of(state.presence_penalty) * (counts > 0)
    edited += state.bias[slots]
    edited = jnp.where(of(state.edits), edited, logits)
    banned = jnp.where(of(state.edits), _banned(state, slots), logits.shape[1])
    row = jnp.arange(logits.shape[0])[:, None]
    without = edited.at[row, banned].set(-jnp.inf, mode="drop")
    some_left = without.max(axis=1, keepdims=True) > -jnp.inf
    return jnp.where(some_left, without, edited)


def _banned(state: DecodeState, slots: Array) -> Array:
    """[B, MAX_END_IDS + MAX_BAD_WORDS] int32: ids that may not come next, padded with V."""
    runs = state.bad_words[slots]
    prefix, last = runs[:, :, :-1], runs[:, :, -1]
    follows = ((prefix < 0) | (prefix == state.window[slots][:, None, :])).all(axis=2)
    early = state.length[slots] < state.min_length[slots]
    ids = jnp.concatenate(
        [jnp.where(early[:, None], state.end_ids[slots], -1), jnp.where(follows, last, -1)], axis=1
    )
    return drop_padding(ids, state.bias.shape[1])


def _gaps(logits: Array, best: Array, temperature: Array) -> Array:
    """[B, n] >= 0: how far each logit is below the best ([B]), in temperatures ([B])."""
    warm = jnp.where(temperature == 0, 1.0, temperature)
    return (best[:, None] - logits) / warm[:, None]


def _threshold(gaps: Array, weights: Array, candidates: Array, top_k: Array, top_p: Array) -> Array:
    """[B]: the largest gap that top-k and top-p keep.

    Args:
      gaps: [B, V] and `weights` = exp(-gaps).
      candidates: [B, n]: the smallest gaps, in order.
    """
    near, found = _near_threshold(candidates, _column_sum(weights), top_k, top_p)

    def search() -> Array:
        return jnp.where(found, near, _far_threshold(gaps, weights, top_k, top_p))

    threshold: Array = lax.cond(found.all(), lambda: near, search)
    return threshold


def _near_threshold(
    candidates: Array, total: Array, top_k: Array, top_p: Array
) -> tuple[Array, Array]:
    """The threshold, and whether the candidates alone determine it ([B] bool)."""
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


def _far_threshold(gaps: Array, weights: Array, top_k: Array, top_p: Array) -> Array:
    """The threshold by bisection over the whole row."""
    gap_columns, weight_columns = _columns(gaps, jnp.inf), _columns(weights)

    def total(values: Array, threshold: Array) -> Array:
        kept = jnp.where(gap_columns <= threshold[:, None, None], values, 0)
        return kept.sum(axis=1).sum(axis=1)

    ones = jnp.ones_like(gap_columns, jnp.int32)
    limits_k = (top_k > 0) & (top_k < gaps.shape[1])
    by_k = jnp.where(limits_k, _least(lambda t: total(ones, t) >= top_k, top_k.shape), jnp.inf)
    target = top_p * total(weight_columns, by_k)
    by_p = _least(lambda t: total(weight_columns, jnp.minimum(t, by_k)) >= target, top_p.shape)
    return jnp.minimum(by_k, jnp.where(top_p < 1.0, by_p, jnp.inf))


def _least(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """The least float32 >= 0 for which a monotone predicate holds; infinity if it never does.

    Bits of such floats, read as integers, have the floats' order: 31 halvings find the exact one.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        below = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(below, low, middle + 1), jnp.where(below, middle, high)

    infinity = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, infinity))
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, bounds)[1], jnp.float32)


def _columns(values: Array, padding: float = 0.0) -> Array:
    """[B, V] → [B, ceil(V / COLUMNS), COLUMNS]."""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % COLUMNS)), constant_values=padding)
    return padded.reshape(values.shape[0], -1, COLUMNS)


def _column_sum(values: Array) -> Array:
    """[B, V] → [B]."""
    return _columns(values).sum(axis=1).sum(axis=1)


def _keys(seeds: Array, positions: Array) -> Array:
    """[B] keys that depend on each row's seed ([B, 2] uint32) and position ([B]) alone."""

    def key(seed: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)

    return jax.vmap(key)(seeds, positions)


def _exponentials(key: Array, count: int) -> Array:
    """[count] float32 from Exp(1), fine near 0, where the winners of a race are.

    64 random bits for each: with 32 or 23 no token rarer than those resolve would be drawn.
    """
    high, low = jax.random.bits(key, (2, count), jnp.uint32).astype(jnp.float32)
    uniform = jnp.minimum(high * 2.0**-32 + low * 2.0**-64, 1.0 - 2.0**-24)
    return -jnp.log1p(-uniform)


def _race(noise: Array, weights: Array) -> Array:
    """[B] int32: the first arrival of each row, at noise / weight; [B, n] both."""
    relative = weights / weights.max(axis=1, keepdims=True)  # so that no quotient overflows
    return jnp.argmin(jnp.where(relative > 0, noise / relative, jnp.inf), axis=1).astype(jnp.int32)


def _advance(
    state: DecodeState, slots: Array, advance: Array, ids: Array, variant: Variant
) -> DecodeState:
    """The state after the rows that advance have taken their tokens."""
    targets = jnp.where(advance, slots, state.num_slots)
    moved = replace(
        state,
        last_token=state.last_token.at[targets].set(ids),
        length=state.length.at[slots].add(advance.astype(jnp.int32)),
    )
    if variant is not Variant.FULL:  # no slot of such a step reads the rest
        return moved
    window = jnp.concatenate([state.window[slots][:, 1:], ids[:, None]], axis=1)
    return replace(
        moved,
        window=state.window.at[targets].set(window),
        output_counts=state.output_counts.at[targets, ids].add(1),
    )
