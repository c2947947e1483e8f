"""What the device remembers of each slot between steps, and how a request sets it.

One row per slot and one more, the scratch row, which padding rows of a step read and write.
The host sends small arrays only (`slot_start`); vocabulary-wide rows are built on the device.
Token ids here are taken to be inside the vocabulary: the engine has checked the request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from grok1_backend.engine.requests import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
    SamplingParams,
)

WINDOW = MAX_BAD_WORD_TOKENS - 1
"""How many of the last tokens bad words are matched against."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Device arrays with a row per slot; the last row is the scratch row. V: vocabulary size."""

    last_token: Array
    """[slots + 1] int32: the newest token; the next decode step feeds it at `length` - 1."""
    length: Array
    """[slots + 1] int32: tokens in the context, the newest included. It is also the position of
    the token drawn next, and so the one thing beside the seed that the draw's key depends on."""
    seed: Array
    """[slots + 1, 2] uint32: the request's 64-bit seed as (high, low), a threefry key."""
    temperature: Array
    """[slots + 1] float32: 0 for argmax, whatever setting asked for it."""
    top_k: Array
    """[slots + 1] int32: 0 keeps all."""
    top_p: Array
    """[slots + 1] float32."""
    min_p: Array
    """[slots + 1] float32."""
    edits: Array
    """[slots + 1] bool: whether the fields below hold for this slot. Where False they are left
    over from an earlier request."""
    repetition_penalty: Array
    """[slots + 1] float32."""
    presence_penalty: Array
    """[slots + 1] float32."""
    frequency_penalty: Array
    """[slots + 1] float32."""
    min_length: Array
    """[slots + 1] int32: end ids are banned while `length` is less than this."""
    end_ids: Array
    """[slots + 1, MAX_END_IDS] int32: padded with -1."""
    window: Array
    """[slots + 1, WINDOW] int32: the newest tokens, the newest last; -1 before the first."""
    bad_words: Array
    """[slots + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] int32: runs aligned right, padded on the
    left with -1: `(7, 9)` is `-1 -1 -1 -1 -1 -1 7 9`, and no run is all -1."""
    output_counts: Array
    """[slots + 1, V] int16: how often each token is in the output."""
    in_prompt: Array
    """[slots + 1, V] bool: whether the prompt holds the token."""
    bias: Array
    """[slots + 1, V] float32: added to the logits; -inf for tokens that are not allowed."""

    @property
    def num_slots(self) -> int:
        """Slots without the scratch row; also the scratch row's index."""
        return self.last_token.shape[0] - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class LogitEdits:
    """The part of a slot's start that requests with `SamplingParams.edits_logits` need."""

    history: NDArray[np.int32]  # [context_length]: prompt, then output; padded with -1
    num_prompt: NDArray[np.int32]  # []
    repetition_penalty: NDArray[np.float32]  # []
    presence_penalty: NDArray[np.float32]  # []
    frequency_penalty: NDArray[np.float32]  # []
    min_length: NDArray[np.int32]  # []
    end_ids: NDArray[np.int32]  # [MAX_END_IDS]: padded with -1
    window: NDArray[np.int32]  # [WINDOW]
    bad_words: NDArray[np.int32]  # [MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    bias_ids: NDArray[np.int32]  # [MAX_LOGIT_BIAS]: padded with -1
    bias_values: NDArray[np.float32]  # [MAX_LOGIT_BIAS]
    allowed: NDArray[np.uint8]  # [ceil(V / 8)]: bit i % 8 (lowest first) of byte i // 8 is token i


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStart:
    """A slot's new row as small host arrays; with `edits` None the wide rows are not touched."""

    last_token: NDArray[np.int32]  # []
    length: NDArray[np.int32]  # []
    seed: NDArray[np.uint32]  # [2]
    temperature: NDArray[np.float32]  # []
    top_k: NDArray[np.int32]  # []
    top_p: NDArray[np.float32]  # []
    min_p: NDArray[np.float32]  # []
    edits: LogitEdits | None


def initial_state(num_slots: int, vocab_size: int) -> DecodeState:
    """A state in which every row, the scratch row included, is greedy and edits nothing."""
    rows = num_slots + 1

    def full(shape: tuple[int, ...], value: float, dtype: jax.typing.DTypeLike) -> Array:
        return jnp.full((rows, *shape), value, dtype)

    return DecodeState(
        last_token=full((), 0, jnp.int32),
        length=full((), 0, jnp.int32),
        seed=full((2,), 0, jnp.uint32),
        temperature=full((), 0.0, jnp.float32),
        top_k=full((), 0, jnp.int32),
        top_p=full((), 1.0, jnp.float32),
        min_p=full((), 0.0, jnp.float32),
        edits=full((), False, jnp.bool_),
        repetition_penalty=full((), 1.0, jnp.float32),
        presence_penalty=full((), 0.0, jnp.float32),
        frequency_penalty=full((), 0.0, jnp.float32),
        min_length=full((), 0, jnp.int32),
        end_ids=full((MAX_END_IDS,), -1, jnp.int32),
        window=full((WINDOW,), -1, jnp.int32),
        bad_words=full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
        output_counts=full((vocab_size,), 0, jnp.int16),
        in_prompt=full((vocab_size,), False, jnp.bool_),
        bias=full((vocab_size,), 0.0, jnp.float32),
    )


def slot_start(
    params: SamplingParams,
    history: NDArray[np.int32],
    num_prompt: int,
    *,
    vocab_size: int,
    context_length: int,
) -> SlotStart:
    """What `start_slot` needs for a request, as padded NumPy arrays.

    Args:
      params: seed must be set, and end_ids too where min_tokens is above 0.
      history: [n] int32, 1 <= n <= context_length: the prompt and, on resumption, the output.
      num_prompt: how many tokens of `history` are prompt.
    """
    if params.seed is None:
        raise ValueError("the seed of a request must be chosen before its slot starts")
    # A temperature that float32 flushes to 0 would divide 0 by 0.
    tiny = float(np.finfo(np.float32).tiny)
    greedy = params.greedy or params.temperature < tiny
    edits = None
    if params.edits_logits:
        edits = _logit_edits(params, history, num_prompt, vocab_size, context_length)
    return SlotStart(
        last_token=np.asarray(history[-1], np.int32),
        length=np.asarray(len(history), np.int32),
        seed=np.array([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32),
        temperature=np.asarray(0.0 if greedy else params.temperature, np.float32),
        top_k=np.asarray(params.top_k, np.int32),
        top_p=np.asarray(params.top_p, np.float32),
        min_p=np.asarray(params.min_p, np.float32),
        edits=edits,
    )


def start_slot(state: DecodeState, slot: Array, start: SlotStart) -> DecodeState:
    """The state with row `slot` ([] int32) set; to be jitted with `state` donated.

    Traced to one program for starts with edits and another, cheap one, for those without.
    """
    narrow = replace(
        state,
        last_token=state.last_token.at[slot].set(start.last_token),
        length=state.length.at[slot].set(start.length),
        seed=state.seed.at[slot].set(start.seed),
        temperature=state.temperature.at[slot].set(start.temperature),
        top_k=state.top_k.at[slot].set(start.top_k),
        top_p=state.top_p.at[slot].set(start.top_p),
        min_p=state.min_p.at[slot].set(start.min_p),
        edits=state.edits.at[slot].set(start.edits is not None),
    )
    return narrow if start.edits is None else _start_edits(narrow, slot, start.edits)


def drop_padding(ids: Array, vocab_size: int) -> Array:
    """The ids with -1 moved past the vocabulary, where an indexed update drops them."""
    return jnp.where(ids < 0, vocab_size, ids)


def _start_edits(state: DecodeState, slot: Array, edits: LogitEdits) -> DecodeState:
    vocab_size = state.bias.shape[1]
    history = drop_padding(jnp.asarray(edits.history), vocab_size)
    is_prompt = jnp.arange(history.shape[0]) < edits.num_prompt
    prompt = jnp.where(is_prompt, history, vocab_size)
    output = jnp.where(is_prompt, vocab_size, history)
    in_prompt = jnp.zeros(vocab_size, jnp.bool_).at[prompt].set(True, mode="drop")
    counts = jnp.zeros(vocab_size, jnp.int16).at[output].add(1, mode="drop")
    allowed = jnp.unpackbits(jnp.asarray(edits.allowed), count=vocab_size, bitorder="little")
    bias_ids = drop_padding(jnp.asarray(edits.bias_ids), vocab_size)
    bias = jnp.where(allowed > 0, jnp.float32(0), -jnp.inf)
    bias = bias.at[bias_ids].add(jnp.asarray(edits.bias_values), mode="drop")
    return replace(
        state,
        repetition_penalty=state.repetition_penalty.at[slot].set(edits.repetition_penalty),
        presence_penalty=state.presence_penalty.at[slot].set(edits.presence_penalty),
        frequency_penalty=state.frequency_penalty.at[slot].set(edits.frequency_penalty),
        min_length=state.min_length.at[slot].set(edits.min_length),
        end_ids=state.end_ids.at[slot].set(edits.end_ids),
        window=state.window.at[slot].set(edits.window),
        bad_words=state.bad_words.at[slot].set(edits.bad_words),
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
        bias=state.bias.at[slot].set(bias),
    )


def _logit_edits(
    params: SamplingParams,
    history: NDArray[np.int32],
    num_prompt: int,
    vocab_size: int,
    context_length: int,
) -> LogitEdits:
    # With ignore_eos end ids are ordinary tokens, which min_tokens does not ban.
    bans_ends = params.min_tokens > 0 and not params.ignore_eos
    if bans_ends and params.end_ids is None:
        raise ValueError("the end ids of a request must be known before its slot starts")
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, run in zip(bad_words, params.bad_words, strict=False):
        row[-len(run) :] = run
    allowed = np.ones(vocab_size, np.bool_)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    values[: len(params.logit_bias)] = [value for _, value in params.logit_bias]
    return LogitEdits(
        history=_padded(history, context_length),
        num_prompt=np.asarray(num_prompt, np.int32),
        repetition_penalty=np.asarray(params.repetition_penalty, np.float32),
        presence_penalty=np.asarray(params.presence_penalty, np.float32),
        frequency_penalty=np.asarray(params.frequency_penalty, np.float32),
        min_length=np.asarray(num_prompt + params.min_tokens if bans_ends else 0, np.int32),
        end_ids=_padded(params.end_ids or (), MAX_END_IDS),
        window=_padded(history[-WINDOW:][::-1], WINDOW)[::-1],
        bad_words=bad_words,
        bias_ids=_padded([token for token, _ in params.logit_bias], MAX_LOGIT_BIAS),
        bias_values=values,
        allowed=np.packbits(allowed, bitorder="little"),
    )


def _padded(
    values: NDArray[np.int32] | tuple[int, ...] | list[int], size: int
) -> NDArray[np.int32]:
    """[size] int32: the values, then -1."""
    padded = np.full(size, -1, np.int32)
    padded[: len(values)] = values
    return padded
