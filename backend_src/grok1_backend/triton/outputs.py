"""The engine's events turned into the outputs of `grok1`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton.interface import Values

_OF_EACH_TOKEN = frozenset({"token_ids", "output_log_probs", "top_token_ids", "top_log_probs"})
_OF_THE_FIRST = frozenset(
    {"prompt_text", "prompt_log_probs", "prompt_top_ids", "prompt_top_log_probs"}
)


def event_values(
    event: TokenEvent, *, log_probs: bool = False, top_tokens: int = 0, prompt_text: str = ""
) -> Values:
    """All outputs of `grok1` for one event.

    Args:
      event: of the engine.
      log_probs: whether those of the tokens are wanted; empty otherwise.
      top_tokens: how many of the most likely tokens are wanted; at 0 there are no rows.
      prompt_text: what goes with the first event.
    """
    is_first = event.num_output_tokens == len(event.token_ids)
    return {
        "finish_reason": event.finish_reason.value if event.finish_reason else "",
        "token_ids": event.token_ids,
        "output_log_probs": event.log_probs[None] if log_probs else (),
        "cum_log_probs": event.cum_log_prob,
        "top_token_ids": _columns(event.top_ids, top_tokens, -1) if top_tokens else (),
        "top_log_probs": _columns(event.top_log_probs, top_tokens, 0) if top_tokens else (),
        "prompt_log_probs": _or_none(event.prompt_log_probs),
        "prompt_top_ids": _or_none(event.prompt_top_ids),
        "prompt_top_log_probs": _or_none(event.prompt_top_log_probs),
        "num_input_tokens": event.num_input_tokens,
        "num_output_tokens": event.num_output_tokens,
        "request_id": event.request_id,
        "text_trim": event.text_trim,
        "prompt_text": prompt_text if is_first else "",
    }


def _or_none(scores: NDArray[np.generic] | None) -> NDArray[np.generic] | tuple[()]:
    return () if scores is None else scores[None]


def _columns(values: NDArray[np.generic], count: int, filler: float) -> NDArray[np.generic]:
    shown = values.copy()
    shown[:, count:] = filler
    return shown[None]


def merge(responses: Sequence[Values]) -> Values:
    """The values of consecutive responses to one request as those of a single one."""
    merged = dict(responses[-1])
    if len(responses) > 1:
        for name in merged.keys() & _OF_THE_FIRST:
            merged[name] = responses[0][name]
        for name in merged.keys() & _OF_EACH_TOKEN:
            merged[name] = _joined([values[name] for values in responses])
    return merged


def _joined(lists: Sequence[Any]) -> Any:
    if isinstance(lists[0], tuple):
        return tuple(itertools.chain.from_iterable(lists))
    return np.concatenate(lists, axis=1)  # behind the batch dimension


def report(request_id: str, reason: FinishReason | None) -> Values:
    """The outputs of a request that generates nothing: what became of the one that it names."""
    event = TokenEvent(
        request_id=request_id,
        finish_reason=reason,
        log_probs=np.empty(0, np.float32),
        top_ids=np.empty((0, TOP_TOKENS), np.int32),
        top_log_probs=np.empty((0, TOP_TOKENS), np.float32),
    )
    return event_values(event)
