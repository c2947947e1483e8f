"""A runner without a model, which holds the scheduler to the contract of `runner_api`.

It keeps a token for each position of each page where a real one keeps KV, and draws the next token
as a hash of the tokens that attention would see through the block table. So whatever goes wrong
with pages changes the output, and `expected_output` says what it should have been.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from grok1_backend.engine.requests import TOP_TOKENS, SamplingParams
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow, PromptScores, StepOutput

EMPTY = -1


def require(condition: bool, message: str) -> None:
    """Fails the test by an exception that the engine does not take for one of the device."""
    if not condition:
        pytest.fail(message)


def draw(history: Sequence[int], seed: int, vocab_size: int) -> int:
    """The fake model: the next token after a history."""
    return zlib.crc32(np.asarray([*history, seed & 0x7FFFFFFF], np.int32).tobytes()) % vocab_size


def log_prob(token: int) -> float:
    return -1.0 - token / 16


def expected_output(
    history: Sequence[int],
    seed: int,
    max_tokens: int,
    vocab_size: int,
    end_ids: Sequence[int] = (),
) -> list[int]:
    """What a request must get, computed token by token."""
    tokens = list(history)
    for _ in range(max_tokens):
        tokens.append(draw(tokens, seed, vocab_size))
        if tokens[-1] in end_ids:
            break
    return tokens[len(history) :]


@dataclass(eq=False)
class FakeStep:
    """A result that can be read in the order of the calls only, and fails if told to."""

    runner: FakeRunner
    number: int
    output: StepOutput
    prompt_scores: PromptScores | None = None
    error: Exception | None = None

    def result(self) -> StepOutput:
        require(self.number > self.runner.last_read, "results are read out of order")
        self.runner.last_read = self.number
        if self.error is not None:
            raise self.error
        return self.output

    def scores(self) -> PromptScores:
        assert self.prompt_scores is not None
        return self.prompt_scores


@dataclass(eq=False)
class FakeSlot:
    sampling: SamplingParams
    history: list[int]
    """The tokens the slot must have: given at its start, drawn since."""
    num_written: int = 0
    sampled: bool = False


@dataclass(eq=False, kw_only=True)
class FakeRunner:
    """See the module. Hooks let a test break it or look at it."""

    num_slots: int = 4
    num_pages: int = 16
    page_size: int = 4
    context_length: int = 48
    vocab_size: int = 50
    max_prefill_tokens: int = 8
    max_prefill_rows: int = 2
    num_compilations: int = 0
    before_call: Callable[[str, list[int]], None] = lambda _kind, _slots: None
    """Called with the kind of call and its slots; may raise."""
    result_error: Callable[[str, list[int]], Exception | None] = lambda _kind, _slots: None
    not_finite: Callable[[int], bool] = lambda _slot: False
    may_write: Callable[[int], bool] = lambda _page: True
    """Whether a page is in one block table only and its content is not published."""
    calls: list[tuple[str, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    """(kind, ((slot, tokens), ...)) of each call, in order."""
    num_steps: int = 0
    last_read: int = 0
    recoveries: int = 0

    def __post_init__(self) -> None:
        self.recover()
        self.recoveries = 0

    def recover(self) -> None:
        self.kv = np.full((self.num_pages, self.page_size), EMPTY, np.int32)
        self.slots: dict[int, FakeSlot] = {}
        self.recoveries += 1

    def prefill_cost(self, lengths: Sequence[int]) -> int:
        return len(lengths) * max(lengths)

    def start_slot(
        self, slot: int, sampling: SamplingParams, history: NDArray[np.int32], num_prompt: int
    ) -> None:
        require(0 <= slot < self.num_slots, "no such slot")
        require(sampling.seed is not None, "no seed")
        require(sampling.end_ids is not None, "no end ids")
        require(
            0 < num_prompt <= len(history) <= self.context_length,
            "the history's length",
        )
        require(history.dtype == np.int32, "the history's type")
        self.before_call("start", [slot])
        self.slots[slot] = FakeSlot(sampling, history.tolist())

    def prefill(self, rows: Sequence[PrefillRow]) -> FakeStep:
        require(0 < len(rows) <= self.max_prefill_rows, "the number of rows")
        self._record("prefill", [(row.slot, len(row.tokens)) for row in rows])
        return self._step("prefill", [(row.slot, self._prefill_row(row)) for row in rows])

    def prefill_scored(self, row: PrefillRow, next_token: int) -> FakeStep:
        self._record("score", [(row.slot, len(row.tokens))])
        step = self._step("score", [(row.slot, self._prefill_row(row))])
        following = np.array([*row.tokens[1:], next_token], np.int32)
        step.prompt_scores = PromptScores(
            log_probs=np.array([log_prob(int(token)) for token in following], np.float32),
            top_ids=np.repeat(following[:, None], TOP_TOKENS, axis=1),
            top_log_probs=np.repeat(-following[:, None].astype(np.float32), TOP_TOKENS, axis=1),
        )
        return step

    def decode(self, rows: Sequence[DecodeRow]) -> FakeStep:
        require(0 < len(rows) <= self.num_slots, "the number of rows")
        self._record("decode", [(row.slot, 1) for row in rows])
        drawn = []
        for row in rows:
            slot = self.slots[row.slot]
            require(slot.sampled, "a decode step before the slot's first token")
            require(len(slot.history) < self.context_length, "a token beyond the context")
            drawn.append((row.slot, self._write(slot, row.pages, slot.history[-1:], sample=True)))
        return self._step("decode", drawn)

    def _prefill_row(self, row: PrefillRow) -> int:
        require(
            0 < len(row.tokens) <= self.max_prefill_tokens,
            "the chunk's length",
        )
        slot = self.slots[row.slot]
        require(not slot.sampled, "a prefill after the slot's first token")
        require(
            row.start == slot.num_written or slot.num_written == 0,
            "a gap between chunks",
        )
        slot.num_written = row.start
        end = row.start + len(row.tokens)
        require(
            slot.history[row.start : end] == row.tokens.tolist(),
            "a chunk of another history",
        )
        require(not row.sample or end == len(slot.history), "a draw inside the history")
        return self._write(slot, row.pages, row.tokens.tolist(), sample=row.sample)

    def _write(
        self, slot: FakeSlot, pages: Sequence[int], tokens: list[int], *, sample: bool
    ) -> int:
        """Writes the tokens after those written; returns the token drawn, or EMPTY."""
        require(len(set(pages)) == len(pages), "a page twice in one block table")
        start = slot.num_written
        slot.num_written = end = start + len(tokens)
        require(len(pages) * self.page_size >= end, "the block table is too short")
        for position, token in enumerate(tokens, start):
            page = pages[position // self.page_size]
            require(self.may_write(page), f"page {page} is shared or published, and written to")
            self.kv[page, position % self.page_size] = token
        seen = self.kv[list(pages)].reshape(-1)[:end].tolist()
        require(seen == slot.history[:end], "attention would see another request's KV")
        if not sample:
            return EMPTY
        token = draw(seen, slot.sampling.seed or 0, self.vocab_size)
        slot.history.append(token)
        slot.sampled = True
        return token

    def _record(self, kind: str, rows: list[tuple[int, int]]) -> None:
        slots = [slot for slot, _ in rows]
        require(len(set(slots)) == len(slots), "a slot twice in one call")
        self.before_call(kind, slots)
        self.calls.append((kind, tuple(rows)))

    def _step(self, kind: str, drawn: list[tuple[int, int]]) -> FakeStep:
        tokens = np.array([token for _, token in drawn], np.int32)
        output = StepOutput(
            token_ids=tokens,
            log_probs=np.array([log_prob(token) for token in tokens.tolist()], np.float32),
            top_ids=np.repeat(tokens[:, None], TOP_TOKENS, axis=1),
            top_log_probs=np.zeros((len(tokens), TOP_TOKENS), np.float32),
            finite=np.array([not self.not_finite(slot) for slot, _ in drawn], np.bool_),
        )
        error = self.result_error(kind, [slot for slot, _ in drawn])
        self.num_steps += 1
        return FakeStep(self, self.num_steps, output, error=error)
