"""The sampler again, in NumPy: sorted, row by row, float64. What the fast one must equal."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.decode_state import DecodeState, initial_state, slot_start, start_slot
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.sampler import SampleOutput, Variant, sample

CONTEXT = 64
SLOTS = 4
"""At least, in every state and step of the tests: fewer shapes, fewer compilations."""

_initial = jax.jit(initial_state, static_argnums=(0, 1))
_start = jax.jit(start_slot)
_sample = jax.jit(sample, static_argnames=("variant", "axis_name"))


def filtered_probs(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.float64], float]:
    """[V] probabilities after the filters, and how near top-p came to another decision.

    The second is the least distance, in probability, between p and the mass of the tokens better
    than some token: below rounding noise either decision is right.
    """
    gaps = (logits.max() - logits) / np.float32(temperature)
    weights = np.exp(-gaps.astype(np.float64))
    ordered = np.sort(gaps)
    if 0 < top_k < len(gaps):
        weights[gaps > ordered[top_k - 1]] = 0
    weights /= weights.sum()
    by_gap = np.argsort(gaps, kind="stable")
    mass = np.concatenate([[0.0], np.cumsum(weights[by_gap])])
    better = mass[np.searchsorted(ordered, gaps, side="left")]
    margin = float(np.abs(better[better > 0] - top_p).min(initial=1.0))
    if top_p < 1:
        weights[better >= top_p] = 0
    weights[np.exp(-gaps) < np.float32(min_p)] = 0
    return weights / weights.sum(), margin


def edited_logits(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
) -> NDArray[np.float64]:
    """[V] logits after penalties, bias and bans."""
    edited = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token in set(output):
        edited[token] -= params.frequency_penalty * list(output).count(token)
        edited[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        edited[token] += bias
    if params.allowed_token_ids is not None:
        allowed = np.isin(np.arange(len(edited)), params.allowed_token_ids)
        edited[~allowed] = -np.inf
    banned = edited.copy()
    context = [*prompt, *output]
    for *prefix, last in params.bad_words:
        if not prefix or context[-len(prefix) :] == prefix:
            banned[last] = -np.inf
    if len(output) < params.min_tokens and not params.ignore_eos:
        banned[list(params.end_ids or ())] = -np.inf
    return banned if banned.max() > -np.inf else edited


def start(
    state: DecodeState,
    slot: int,
    params: SamplingParams,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
) -> DecodeState:
    """The state with a request in `slot`; seed and end ids have defaults."""
    history = np.array([*prompt, *output], np.int32)
    given = {**vars(params), "seed": params.seed or 0, "end_ids": params.end_ids or ()}
    start = slot_start(
        SamplingParams(**given),
        history,
        len(prompt),
        vocab_size=state.bias.shape[1],
        context_length=CONTEXT,
    )
    return _start(state, np.int32(slot), start)


def states(vocab_size: int, *requests: SamplingParams) -> DecodeState:
    """A state with one slot for each request, and free ones up to SLOTS."""
    state = _initial(max(len(requests), SLOTS), vocab_size)
    for slot, params in enumerate(requests):
        state = start(state, slot, params)
    return state


def step(
    state: DecodeState,
    logits: NDArray[np.float32],
    slots: Sequence[int] | None = None,
    advance: Sequence[bool] | None = None,
    variant: Variant = Variant.FULL,
) -> tuple[DecodeState, SampleOutput]:
    """One step of the rows; slots 0, 1, … and all advancing unless given."""
    rows = len(logits)
    padding = max(SLOTS - rows, 0)
    slots = [*(range(rows) if slots is None else slots), *[state.num_slots] * padding]
    advance = [*([True] * rows if advance is None else advance), *[False] * padding]
    state, output = _sample(
        state,
        np.pad(np.asarray(logits, np.float32), ((0, padding), (0, 0))),
        np.array(slots, np.int32),
        np.array(advance, np.bool_),
        variant=variant,
    )
    return state, jax.tree.map(lambda array: np.asarray(array)[:rows], output)
