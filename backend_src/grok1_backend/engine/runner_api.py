"""What the scheduler may ask of a runner, and what it gets: the whole contract between them.

The scheduler owns slots, pages and requests on the host; the runner owns the device: weights,
KV pages, and per slot the last token, position, penalty counts, bad-word window and sampling
settings. Calls return at once; the device works in order of the calls. The runner feeds the
token drawn by one step to the next one itself, so the scheduler can dispatch step n + 1 before
it has read step n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.requests import SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillRow:
    """A run of known tokens of one slot, written to its pages in one step."""

    slot: int
    tokens: NDArray[np.int32]  # [n], n <= the largest prefill bucket
    start: int
    """Position of tokens[0]; the positions before it are in the pages already."""
    pages: Sequence[int]
    """The slot's block table; covers start + n positions."""
    sample: bool
    """Draw the next token after the last one (the prompt ends here)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeRow:
    """One more token of a slot: the runner feeds the slot's last drawn token."""

    slot: int
    pages: Sequence[int]
    """The slot's block table; covers the position that this step writes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """What comes back from the device, one row for each row of the call, in its order."""

    token_ids: NDArray[np.int32]  # [rows]; meaningless where a prefill row did not sample
    log_probs: NDArray[np.float32]  # [rows]
    top_ids: NDArray[np.int32]  # [rows, TOP_TOKENS]
    top_log_probs: NDArray[np.float32]  # [rows, TOP_TOKENS]
    finite: NDArray[np.bool_]  # [rows]; False where the logits held NaN: the request must fail


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptScores:
    """For each token of a scored prefill row: how likely the token *after* it was.

    Entry i is about tokens[i + 1]; the last entry is about the given `next_token`.
    """

    log_probs: NDArray[np.float32]  # [n]
    top_ids: NDArray[np.int32]  # [n, TOP_TOKENS]
    top_log_probs: NDArray[np.float32]  # [n, TOP_TOKENS]


class StepHandle(Protocol):
    """A dispatched step."""

    def result(self) -> StepOutput:
        """Waits for the device. Raises what the device raised."""
        ...


class ScoreHandle(Protocol):
    """A dispatched scoring prefill."""

    def scores(self) -> PromptScores: ...

    def result(self) -> StepOutput: ...


class Runner(Protocol):
    """The device side. Not thread-safe: only the scheduler thread calls it.

    A block table in a row is read before the call returns; the scheduler changes it afterwards.
    """

    num_slots: int
    num_pages: int
    """Pages in the pool; page ids are 0 to num_pages - 1, all usable."""
    page_size: int
    """Positions in a page."""
    context_length: int
    vocab_size: int
    max_prefill_tokens: int
    """The largest bucket: the most tokens of one PrefillRow."""
    max_prefill_rows: int
    """The most rows of one prefill call."""

    @property
    def num_compilations(self) -> int:
        """Programs that this process compiled since the runner was made: none, if all is well."""
        ...

    def prefill_cost(self, lengths: Sequence[int]) -> int:
        """Padded tokens that one call with rows of these lengths computes."""
        ...

    def start_slot(
        self, slot: int, sampling: SamplingParams, history: NDArray[np.int32], num_prompt: int
    ) -> None:
        """Resets a slot's device state for a request.

        Args:
          slot: 0 to num_slots - 1.
          sampling: seed and end_ids must be set.
          history: [n] prompt and, on resumption, the tokens drawn before preemption: penalty
            counts, bad-word window and the key's position continue from it.
          num_prompt: how many of `history` are prompt.
        """
        ...

    def prefill(self, rows: Sequence[PrefillRow]) -> StepHandle:
        """Dispatches one prefill of up to max_prefill_rows rows, each of another slot."""
        ...

    def prefill_scored(self, row: PrefillRow, next_token: int) -> ScoreHandle:
        """As `prefill` for one row, and scores every position (next_token -1: none known)."""
        ...

    def decode(self, rows: Sequence[DecodeRow]) -> StepHandle:
        """Dispatches one decode step of up to num_slots rows, each of another slot."""
        ...

    def recover(self) -> None:
        """After a call or a result raised: makes the device state anew, every slot and page empty.

        What was dispatched before is lost. Raises if the device cannot go on.
        """
        ...
