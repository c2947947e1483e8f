"""Calls to the runner: which rows go into one, and what the host remembers until it reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grok1_backend.engine.generation import Generation
from grok1_backend.engine.runner_api import (
    PrefillRow,
    PromptScores,
    Runner,
    ScoreHandle,
    StepHandle,
    StepOutput,
)


class CallFailed(Exception):
    """The runner raised `cause`, in a call or in its results."""

    def __init__(self, concerned: list[Generation], cause: Exception) -> None:
        super().__init__(str(cause))
        self.concerned = concerned
        """The requests of the call that have neither ended nor lost their slot since."""
        self.cause = cause


@dataclass(slots=True, eq=False)
class Call:
    """A dispatched call whose results the host has not read."""

    handle: StepHandle
    members: list[tuple[Generation, int, bool]]
    """For each row: the request, its epoch at dispatch, whether a token is drawn."""
    num_tokens: int
    """Computed by the call, without padding."""
    score: ScoreHandle | None = None

    def read(self) -> tuple[StepOutput, PromptScores | None] | None:
        """Waits for the results; None, without waiting, if they are of no use any more.

        Raises:
          CallFailed: the runner raised.
        """
        concerned = [
            generation for generation, epoch, _ in self.members if generation.epoch == epoch
        ]
        if not concerned:
            return None
        try:
            return self.handle.result(), self.score.scores() if self.score else None
        except Exception as error:
            raise CallFailed(concerned, error) from error


def start(runner: Runner, generation: Generation) -> None:
    """Prepares the slot that the request has got.

    Raises:
      CallFailed: the runner raised.
    """
    history = generation.tokens[: generation.length]
    try:
        runner.start_slot(generation.slot, generation.sampling, history, generation.num_prompt)
    except Exception as error:
        raise CallFailed([generation], error) from error


def prefill(runner: Runner, prompts: Iterable[Generation], token_budget: int) -> Call | None:
    """Dispatches the next chunks of some of the prompts; None if there are no prompts.

    Raises:
      CallFailed: the runner raised.
    """
    plan = plan_prefill(runner, prompts, token_budget)
    if not plan:
        return None
    members = [(prompt, prompt.epoch, row.sample) for prompt, row in plan.items()]
    first, rows = members[0][0], list(plan.values())
    num_tokens = sum(len(row.tokens) for row in rows)
    try:
        if first.unscored:
            score = runner.prefill_scored(rows[0], first.token_after(rows[0]))
            call = Call(score, members, num_tokens, score)
        else:
            call = Call(runner.prefill(rows), members, num_tokens)
    except Exception as error:
        raise CallFailed(list(plan), error) from error
    for prompt, row in plan.items():
        prompt.dispatched += len(row.tokens)
    return call


def plan_prefill(
    runner: Runner, prompts: Iterable[Generation], token_budget: int
) -> dict[Generation, PrefillRow]:
    """The rows of one prefill call.

    The first prompt always gets a chunk, so each comes to its end. Others join where all that is
    left of them (or the largest chunk of it) keeps the padded tokens within the budget. A prompt
    to be scored is alone in its call.

    Args:
      runner: for its limits and `prefill_cost`.
      prompts: not wholly prefilled, first come first.
      token_budget: padded tokens; only the padding of the first chunk may go beyond.
    """
    largest = min(token_budget, runner.max_prefill_tokens)
    plan: dict[Generation, PrefillRow] = {}
    lengths: list[int] = []
    for prompt in prompts:
        length = min(prompt.prefill_end - prompt.dispatched, largest)
        too_much = plan and runner.prefill_cost([*lengths, length]) > token_budget
        if too_much or (plan and prompt.unscored):
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


def decode(runner: Runner, streams: list[Generation]) -> Call | None:
    """Dispatches one more token of each stream; None if there are no streams.

    Raises:
      CallFailed: the runner raised.
    """
    if not streams:
        return None
    try:
        handle = runner.decode([stream.decode_row for stream in streams])
    except Exception as error:
        raise CallFailed(streams, error) from error
    for stream in streams:
        stream.dispatched += 1
    return Call(handle, [(stream, stream.epoch, True) for stream in streams], len(streams))
