"""The engine's events turned into the outputs of `grok1`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton.interface import GROK1, Tensors


def event_tensors(
    event: TokenEvent, *, log_probs: bool = False, top_tokens: int = 0, prompt_text: str = ""
) -> Tensors:
    """All outputs of `grok1` for one event.

    Args:
      event: of the engine.
      log_probs: whether those of the tokens are wanted; empty otherwise.
      top_tokens: how many of the most likely tokens are wanted; at 0 there are no rows.
      prompt_text: what goes with the first event.
    """
    shown = slice(None) if log_probs else slice(0)
    is_first = event.num_output_tokens == len(event.token_ids)
    no_rows = np.empty((0, TOP_TOKENS))
    values = {
        "finish_reason": event.finish_reason.value if event.finish_reason else "",
        "token_ids": event.token_ids,
        "output_log_probs": event.log_probs[shown],
        "cum_log_probs": event.cum_log_prob,
        "top_token_ids": _columns(event.top_ids, top_tokens, -1),
        "top_log_probs": _columns(event.top_log_probs, top_tokens, 0),
        "prompt_log_probs": () if event.prompt_log_probs is None else event.prompt_log_probs,
        "prompt_top_ids": no_rows if event.prompt_top_ids is None else event.prompt_top_ids,
        "prompt_top_log_probs": (
            no_rows if event.prompt_top_log_probs is None else event.prompt_top_log_probs
        ),
        "num_input_tokens": event.num_input_tokens,
        "num_output_tokens": event.num_output_tokens,
        "request_id": event.request_id,
        "text_trim": event.text_trim,
        "prompt_text": prompt_text if is_first else "",
    }
    return {
        field.name: field.tensor(values[field.name])
        for field in GROK1.outputs
        if field.name in values
    }


def _columns(values: NDArray[np.generic], count: int, filler: float) -> NDArray[np.generic]:
    if not count:
        return values[:0]
    shown = values.copy()
    shown[:, count:] = filler
    return shown


def merge(events: Sequence[TokenEvent]) -> TokenEvent:
    """Consecutive events of one request as a single one."""
    if len(events) == 1:
        return events[0]
    return dataclasses.replace(
        events[-1],
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        log_probs=np.concatenate([event.log_probs for event in events]),
        top_ids=np.concatenate([event.top_ids for event in events]),
        top_log_probs=np.concatenate([event.top_log_probs for event in events]),
        prompt_log_probs=events[0].prompt_log_probs,
        prompt_top_ids=events[0].prompt_top_ids,
        prompt_top_log_probs=events[0].prompt_top_log_probs,
    )


def report(request_id: str, reason: FinishReason | None) -> Tensors:
    """The outputs of a request that generates nothing: what became of the one that it names."""
    event = TokenEvent(
        request_id=request_id,
        finish_reason=reason,
        log_probs=np.empty(0, np.float32),
        top_ids=np.empty((0, TOP_TOKENS), np.int32),
        top_log_probs=np.empty((0, TOP_TOKENS), np.float32),
    )
    return event_tensors(event)
