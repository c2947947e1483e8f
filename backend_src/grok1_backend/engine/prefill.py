"""Which chunks of which prompts one step computes."""

from __future__ import annotations

from collections.abc import Iterable

from grok1_backend.engine.generation import Generation
from grok1_backend.engine.runner_api import PrefillRow, Runner


def plan_prefill(
    prompts: Iterable[Generation], runner: Runner, token_budget: int
) -> dict[Generation, PrefillRow]:
    """The rows of one prefill call.

    The first prompt always gets a chunk, so each comes to its end. Others join if all that is
    left of them fits (or the largest chunk of it), until the padded tokens reach the budget.
    A prompt to be scored is alone in its call.

    Args:
      prompts: not wholly prefilled, first come first.
      runner: for its limits and `prefill_cost`.
      token_budget: padded tokens; the padding of the first chunk may go beyond.
    """
    largest = min(token_budget, runner.max_prefill_tokens)
    plan: dict[Generation, PrefillRow] = {}
    lengths: list[int] = []
    for prompt in prompts:
        length = min(prompt.prefill_end - prompt.dispatched, largest)
        if plan and (prompt.unscored or runner.prefill_cost([*lengths, length]) > token_budget):
            continue
        end = prompt.dispatched + length
        plan[prompt] = PrefillRow(
            slot=prompt.slot,
            tokens=prompt.tokens[prompt.dispatched : end],
            start=prompt.dispatched,
            pages=prompt.table.pages,
            sample=end == prompt.prefill_end and prompt.length < prompt.limit,
        )
        lengths.append(length)
        if prompt.unscored or len(plan) == runner.max_prefill_rows:
            break
    return plan
