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
* Bans (bad words, end ids before min_tokens) that leave no token do not hold at that step; the
  banned tokens' logits are compared to 1/64 then.
* A token below about 1e-38 of the best one's probability is never drawn.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from grok1_backend.engine.decode_state import DecodeState, drop_padding
from grok1_backend.engine.filters import (
    FOLD,
    Weigh,
    filter_by,
    fold,
    weigh_by,
)
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.runner_api import StepOutput
from grok1_backend.engine.scoring import model_choice

BAN = 2.0**17
"""Lowers the logit of a banned token: beyond any logit, bias (to 1e4) and temperature (to 100) its
weight is 0. Not infinity, so that among tokens that are all banned the likelier ones still win."""


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

    def packed(self) -> Array:
        """All in one array, to come to the host in one copy: [B, 3 + 2 * TOP_TOKENS] int32.

        In the order of the fields, floats by their bits; `unpack` takes it apart.
        """
        columns = (
            self.ids[:, None],
            lax.bitcast_convert_type(self.log_probs, jnp.int32)[:, None],
            self.top_ids,
            lax.bitcast_convert_type(self.top_log_probs, jnp.int32),
            self.finite.astype(jnp.int32)[:, None],
        )
        return jnp.concatenate(columns, axis=1)


def unpack(packed: NDArray[np.int32]) -> StepOutput:
    """What `SampleOutput.packed` put together, on the host: views of it where they can be."""
    floats, last = packed.view(np.float32), packed.shape[1] - 1
    tops = (last - 2) // 2
    return StepOutput(
        token_ids=packed[:, 0],
        log_probs=floats[:, 1],
        top_ids=packed[:, 2 : 2 + tops],
        top_log_probs=floats[:, 2 + tops : last],
        finite=packed[:, last] > 0,
    )


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
    model = model_choice(logits, axis_name)
    if variant is Variant.GREEDY:
        ids, log_probs = model.ids[:, 0], model.log_probs[:, 0]
    else:
        if axis_name is not None:
            logits = lax.all_gather(logits, axis_name, axis=1, tiled=True)
        temperature, edited = state.temperature[slots], logits
        if variant is Variant.FULL:
            edited = _edit(state, logits, slots)
            limits = state.top_k[slots], state.top_p[slots], state.min_p[slots]
            best, weigh = filter_by(edited, temperature, *limits)
        else:
            best, weigh = model.ids[:, 0], weigh_by(model.logits[:, 0], temperature)
        drawn = draw(edited, weigh, _keys(state.seed[slots], state.length[slots]))
        ids = jnp.where(temperature == 0, best, drawn)
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


def draw(logits: Array, weigh: Weigh, keys: Array) -> Array:
    """Draws a token of each row, with probability proportional to its weight.

    An exponential race, in which arrival i comes at Exp(1) / weight i, in heats: among sums of
    many weights first, then among the parts of the winning sum. Unlike the inverse of a
    cumulative sum it has no rounding by which a small weight is lost or a zero one drawn.

    Args:
      logits: [B, V]; one weight of a row is above 0. A token of weight 0 is never drawn.
      keys: [B] typed threefry keys.

    Returns:
      [B] int32.
    """
    size = logits.shape[1]
    levels = [fold(weigh(logits))]
    while levels[-1].shape[1] > 4 * FOLD:
        levels.append(fold(levels[-1]))
    noise = jax.vmap(lambda key: _exponentials(key, 4 * FOLD + FOLD * len(levels)))(keys)
    final = levels[-1]
    winner = _race(noise[:, : final.shape[1]], final)
    for heat, level in enumerate(reversed(levels)):
        # A sum at j of fold is of the parts at j, j + sums, …: of a lower level or of the row.
        sums, last = level.shape[1], heat == len(levels) - 1
        below = logits if last else levels[-2 - heat]
        index = winner[:, None] + sums * jnp.arange(FOLD)
        parts = jnp.take_along_axis(below, index, axis=1, mode="clip")
        weights = jnp.where(index < below.shape[1], weigh(parts) if last else parts, 0.0)
        start = FOLD * (4 + heat)
        winner += sums * _race(noise[:, start : start + FOLD], weights)
    return jnp.minimum(winner, size - 1)


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
    lowered = edited.at[row, banned].get(mode="clip") - BAN
    return edited.at[row, banned].set(lowered, mode="drop")


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
