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

from grok1_backend.engine import calls
from grok1_backend.engine.calls import Call, CallFailed
from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.generation import Ending, Generation
from grok1_backend.engine.kv_pages import KVPages
from grok1_backend.engine.requests import FinishReason
from grok1_backend.engine.runner_api import Runner
from grok1_backend.engine.stats import Meter
from grok1_backend.engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)

Admitted = Callable[[Generation], None]
"""Told of a request that got a slot."""
Finished = Callable[[Generation, FinishReason, EngineError | None, int], None]
"""Told of a request that has left: why, its error, how many bytes of its text are not shown."""

MAX_FAILURES = 3
"""After so many failed steps in a row the runner counts as broken."""


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
        self._unread: list[Call] = []
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
        sound = error is None or error.code is not ErrorCode.INTERNAL
        self._vacate(generation, resumable=sound and generation.session is not None)
        self._finished(generation, reason, error, text_trim)

    def step(self) -> bool:
        """One turn; False if there is nothing left to do.

        Raises:
          Exception: what the runner raised, when it cannot go on.
        """
        unread, self._unread = self._unread, []
        try:
            streams = self._reserve()
            self._admit()
            self._dispatch(streams)
            for call in unread:
                self._hand_out(call)
        except CallFailed as failure:
            self._recover(failure)
        return bool(unread or self._unread or self._waiting)

    def _reserve(self) -> list[Generation]:
        """Gets each stream its page for one more token, if need be from the youngest request."""
        streams = [g for g in self._decoding if g.dispatched + 1 < g.limit]
        for stream in streams:
            while stream.slot >= 0 and not self._pages.extend(stream.table, stream.dispatched + 1):
                self._preempt(max([*self._prefilling, *self._decoding], key=lambda g: g.arrival))
        return [stream for stream in streams if stream.slot >= 0]

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
            calls.start(self._runner, first)

    def _dispatch(self, streams: list[Generation]) -> None:
        """Sends a chunk of the prompts and one more token of each stream to the device."""
        prefill = calls.prefill(self._runner, self._prefilling, self._budget)
        if prefill is not None:
            self._unread.append(prefill)
            for prompt, _, _ in prefill.members:
                self._pages.publish(prompt.table, prompt.tokens, prompt.dispatched)
                if prompt.dispatched == prompt.prefill_end:
                    del self._prefilling[prompt]
                    self._decoding[prompt] = None
        decode = calls.decode(self._runner, streams)
        if decode is not None:
            self._unread.append(decode)
        if prefill or decode:
            self._meter.stepped(len(streams), prefill.num_tokens if prefill else 0)

    def _hand_out(self, call: Call) -> None:
        """Reads a call's results and gives each request its own."""
        results = call.read()
        if results is None:
            return
        output, scores = results
        self._failures = 0
        now = self._clock()
        token_ids, log_probs = output.token_ids.tolist(), output.log_probs.tolist()
        finite = output.finite.tolist()
        drawing: list[Generation] = []
        endings: list[tuple[Generation, Ending]] = []
        for row, (generation, epoch, drawn) in enumerate(call.members):
            if generation.epoch != epoch:
                continue  # it ended, or lost its slot, after this was dispatched
            try:
                if scores is not None:
                    generation.score(scores)
                if drawn:
                    top = output.top_ids[row], output.top_log_probs[row]
                    ending = generation.accept(token_ids[row], log_probs[row], *top, finite[row])
                    drawing.append(generation)
                    self._pages.publish(generation.table, generation.tokens, generation.length - 1)
                else:
                    ending = generation.ending_without_output()
            except EngineError as error:
                self._pages.forget(generation.table)
                ending = FinishReason.ERROR, error, 0
            if ending is not None:
                endings.append((generation, ending))
        self._meter.drawn(drawing, now)
        for generation, ending in endings:
            self.finish(generation, *ending)

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

    def _recover(self, failure: CallFailed) -> None:
        """After a failed call: ends its requests, and has all others computed again."""
        logger.error("a call of the runner failed", exc_info=failure.cause)
        error = EngineError(ErrorCode.INTERNAL, f"the step failed: {failure}")
        for generation in failure.concerned:
            self.finish(generation, FinishReason.ERROR, error)
        for generation in [*self._prefilling, *self._decoding]:
            self._preempt(generation)
        self._pages.clear()
        self._failures += 1
        if self._failures == MAX_FAILURES:
            raise failure.cause
        self._runner.recover()
