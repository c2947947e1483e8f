"""The scheduler's step: which request computes what next (DESIGN.md, Engine).

Owns slots, pages and the order of requests. The device works in the order of the calls and is
one step ahead of the host: step n + 1 is dispatched before the tokens of step n are read. So a
request that ends with a token of step n may have a token drawn by step n + 1. That one is
discarded; its page is free only from then on, so whoever gets it next writes to it later.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.generation import Generation
from grok1_backend.engine.kv_pages import KVPages
from grok1_backend.engine.prefill import plan_prefill
from grok1_backend.engine.requests import FinishReason
from grok1_backend.engine.runner_api import (
    PromptScores,
    Runner,
    ScoreHandle,
    StepHandle,
    StepOutput,
)
from grok1_backend.engine.stats import Meter
from grok1_backend.engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)

Admitted = Callable[[Generation], None]
"""Told of a request that got a slot."""
Finished = Callable[[Generation, FinishReason, EngineError | None, int], None]
"""Told of a request that has left: why, its error, how many bytes of its text are not shown."""

MAX_FAILURES = 3
"""After so many failed calls in a row the runner counts as broken."""


@dataclass(slots=True, eq=False)
class _Call:
    """A dispatched call whose results the host has not read."""

    handle: StepHandle
    members: list[tuple[Generation, int, bool]]
    """For each row: the request, its epoch at dispatch, whether a token is drawn."""
    score: ScoreHandle | None = None

    def concerned(self) -> list[Generation]:
        """The requests that neither ended nor lost their slot since."""
        return [generation for generation, epoch, _ in self.members if generation.epoch == epoch]


class Scheduler:
    """Continuous batching. Only the scheduler thread calls it."""

    def __init__(
        self,
        runner: Runner,
        pages: KVPages,
        meter: Meter,
        *,
        admitted: Admitted,
        finished: Finished,
        prefill_token_budget: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._meter = meter
        self._admitted = admitted
        self._finished = finished
        self._budget = prefill_token_budget
        self._clock = clock
        self._waiting: WaitingQueue[Generation] = WaitingQueue()
        self._prefilling: dict[Generation, None] = {}  # in the order of admission
        self._decoding: dict[Generation, None] = {}
        self._free_slots = list(range(runner.num_slots))  # a heap
        self._unread: list[_Call] = []
        self._blocked: tuple[Generation, int] | None = None
        self._failures = 0

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, generation: Generation) -> None:
        """Lets a request wait for its slot."""
        self._waiting.push(generation)

    def finish(
        self,
        generation: Generation,
        reason: FinishReason,
        error: EngineError | None = None,
        text_trim: int = 0,
    ) -> None:
        """Ends a request, wherever it is; its slot and pages are free at once."""
        self._waiting.remove(generation)
        self._vacate(generation, resumable=generation.session is not None)
        self._finished(generation, reason, error, text_trim)

    def step(self) -> bool:
        """One turn; False if there was nothing to do.

        Raises:
          Exception: what the runner raised, when it cannot go on.
        """
        unread, self._unread = self._unread, []
        decoding = self._reserve()
        self._admit()
        num_prefilled = self._prefill()
        num_decoded = self._decode(decoding)
        if self._unread:
            self._meter.stepped(num_decoded, num_prefilled)
        for call in unread:
            self._collect(call)
        return bool(unread or self._unread or self._waiting)

    def _reserve(self) -> list[Generation]:
        """Gets each stream its page for one more token, if need be from the youngest request."""
        decoding = [g for g in self._decoding if g.dispatched + 1 < g.limit]
        for stream in decoding:
            while stream.slot >= 0 and not self._pages.extend(stream.table, stream.dispatched + 1):
                self._preempt(max([*self._prefilling, *self._decoding], key=lambda g: g.arrival))
        return [g for g in decoding if g.slot >= 0]

    def _admit(self) -> None:
        """Gives slots to the first in the queue while there are slots and pages."""
        while self._free_slots and (first := self._waiting.first()) is not None:
            if self._blocked == (first, self._pages.available):
                return  # nothing has changed since it did not fit
            if not first.begun:
                first.begin()
            known = 0 if first.unscored else first.length - 1
            table = self._pages.reuse(first.tokens, known, first.tail_end)
            first.tail_end = table.reused
            # A page is left for each running stream, lest the newcomer be preempted at once.
            if not self._pages.extend(table, first.length, spare=self.num_running):
                self._pages.release(table, first.tokens, table.reused)
                self._blocked = (first, self._pages.available)
                return
            self._waiting.pop()
            first.occupy(heapq.heappop(self._free_slots), table)
            self._prefilling[first] = None
            self._admitted(first)
            history = first.tokens[: first.length]
            try:
                self._runner.start_slot(first.slot, first.sampling, history, first.num_prompt)
            except Exception as error:
                self._fail([first], error)
                return

    def _prefill(self) -> int:
        """Dispatches a chunk of the admitted prompts; returns its tokens."""
        plan = plan_prefill(self._prefilling, self._runner, self._budget)
        if not plan:
            return 0
        rows = list(plan.values())
        members = [(prompt, prompt.epoch, row.sample) for prompt, row in plan.items()]
        try:
            if members[0][0].unscored:
                score = self._runner.prefill_scored(rows[0], members[0][0].token_after(rows[0]))
                self._unread.append(_Call(score, members, score))
            else:
                self._unread.append(_Call(self._runner.prefill(rows), members))
        except Exception as error:
            self._fail(list(plan), error)
            return 0
        for prompt, row in plan.items():
            prompt.dispatched += len(row.tokens)
            self._pages.publish(prompt.table, prompt.tokens, prompt.dispatched)
            if prompt.dispatched == prompt.prefill_end:
                del self._prefilling[prompt]
                self._decoding[prompt] = None
        return sum(len(row.tokens) for row in rows)

    def _decode(self, decoding: list[Generation]) -> int:
        """Dispatches one more token of each stream; returns how many."""
        decoding = [g for g in decoding if g.slot >= 0]  # a failed prefill preempts all
        if not decoding:
            return 0
        try:
            handle = self._runner.decode([g.decode_row for g in decoding])
        except Exception as error:
            self._fail(decoding, error)
            return 0
        self._unread.append(_Call(handle, [(g, g.epoch, True) for g in decoding]))
        for stream in decoding:
            stream.dispatched += 1
        return len(decoding)

    def _collect(self, call: _Call) -> None:
        """Waits for a call's results and hands them out."""
        concerned = call.concerned()
        if not concerned:
            return
        try:
            output = call.handle.result()
            scores = call.score.scores() if call.score else None
        except Exception as error:
            self._fail(concerned, error)
            return
        self._failures = 0
        self._hand_out(call, output, scores)

    def _hand_out(self, call: _Call, output: StepOutput, scores: PromptScores | None) -> None:
        now = self._clock()
        token_ids, log_probs = output.token_ids.tolist(), output.log_probs.tolist()
        finite = output.finite.tolist()
        for row, (generation, epoch, drawn) in enumerate(call.members):
            if generation.epoch != epoch:
                continue  # it ended, or lost its slot, after this was dispatched
            sound = finite[row] or not drawn
            if scores is not None:
                sound = generation.score(scores) and sound
            if not sound:
                self._pages.forget(generation.table)
                error = EngineError(ErrorCode.INTERNAL, "the model's logits are not finite")
                self.finish(generation, FinishReason.ERROR, error)
            elif drawn:
                reason, text_trim = generation.accept(
                    token_ids[row], log_probs[row], output.top_ids[row], output.top_log_probs[row]
                )
                self._meter.token(generation, now)
                self._pages.publish(generation.table, generation.tokens, generation.length - 1)
                if reason is not None:
                    self.finish(generation, reason, text_trim=text_trim)
            elif generation.num_scored == generation.limit:  # max_tokens 0: that was all
                self.finish(generation, FinishReason.LENGTH)

    def _preempt(self, generation: Generation) -> None:
        """Takes a request's slot; it waits in its old place and is computed again later."""
        self._vacate(generation, resumable=True)
        self._waiting.push(generation)
        self._meter.preempted()

    def _vacate(self, generation: Generation, *, resumable: bool) -> None:
        if generation.slot < 0:
            return
        self._prefilling.pop(generation, None)
        self._decoding.pop(generation, None)
        heapq.heappush(self._free_slots, generation.slot)
        table, known = generation.leave_slot()
        if resumable:
            self._pages.release(table, generation.tokens, known)
        else:
            self._pages.release(table)

    def _fail(self, concerned: list[Generation], cause: Exception) -> None:
        """After a failed call: ends its requests, and has all others computed again."""
        logger.error("a call of the runner failed", exc_info=cause)
        for generation in concerned:
            error = EngineError(ErrorCode.INTERNAL, f"the step failed: {cause}")
            self.finish(generation, FinishReason.ERROR, error)
        for generation in [*self._prefilling, *self._decoding]:
            self._preempt(generation)
        self._pages.clear()
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise cause
        self._runner.recover()
