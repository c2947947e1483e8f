"""The engine: takes requests in from any thread, runs the scheduler in one of its own.

Validates what needs the model's sizes, owns sessions and request ids, and says how it is. Its lock
guards what callers touch (arrivals, aborts, live ids, sessions, deadlines); slots, pages and the
queue belong to the scheduler thread alone, which also calls every sink and never holds the lock
meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.engine.generation import Generation, TokenBytes
from grok1_backend.engine.kv_pages import KVPages
from grok1_backend.engine.requests import (
    EventSink,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from grok1_backend.engine.runner_api import Runner
from grok1_backend.engine.scheduler import Scheduler
from grok1_backend.engine.sessions import CorrelationId, Sessions
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.engine.stats import EngineStats, Meter, Observer
from grok1_backend.engine.validation import check_fit, check_token_ids
from grok1_backend.engine.waiting import LazyHeap

logger = logging.getLogger(__name__)

IDLE_TICK = 1.0
"""Seconds after which an idle engine looks for sessions and pages that have outlived their time."""
STOP_TIMEOUT = 10.0
"""Seconds that `drain` and `close` wait for a device that does not answer."""


class Engine:
    """Continuous batching behind `submit`."""

    def __init__(
        self,
        runner: Runner,
        *,
        end_ids: Sequence[int],
        token_bytes: TokenBytes | None = None,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the scheduler thread.

        Args:
          runner: the device side, compiled; from now on only the scheduler thread calls it.
          end_ids: the model's, for requests that name none.
          token_bytes: the bytes of a token (`Tokenizer.token_bytes`); without it each token is an
            event and stop words are refused.
          settings: limits and times.
          observer: gets the moments that histograms are made of.
          clock: seconds; deadlines of requests are in its time.
        """
        self.settings = settings or EngineSettings()
        self._runner = runner
        self._end_ids = tuple(end_ids)
        self._token_bytes = token_bytes
        self._clock = clock
        self._meter = Meter(observer or Observer())
        self._pages = KVPages(runner.num_pages, runner.page_size, clock)
        self._scheduler = Scheduler(
            runner,
            self._pages,
            self._meter,
            admitted=self._admitted,
            finished=self._finished,
            prefill_token_budget=self.settings.prefill_token_budget,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._empty = threading.Condition(self._lock)
        self._arrival = itertools.count()
        self._arrivals: list[Generation] = []
        self._aborts: list[tuple[Generation, EngineError]] = []
        self._live: dict[str, Generation] = {}
        self._unfinished = 0  # living requests, and those whose last event is being sent
        self._deadlines: LazyHeap[Generation] = LazyHeap()
        self._sessions = Sessions(self.settings.max_sessions, self.settings.session_lifetime)
        self._refusal: str | None = None  # why no request is taken in any more
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._start()

    @property
    def healthy(self) -> bool:
        """False once the engine has given up: every request then fails, and it never recovers."""
        return not self._broken

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Takes a request in; its events go to `sink`, on the scheduler thread.

        Args:
          request: its id must not be that of a living request. Without seed or end_ids it gets a
            random seed and the model's end ids.
          sink: must not block; the last event, and only that, has a finish reason.

        Raises:
          EngineError: INVALID_ARG for what cannot be served, NOT_FOUND for an unknown session,
            UNAVAILABLE when the queue is full or the engine takes no more requests. The sink is
            not called then. A session stays as it was, unless the turn had START (the session of
            that id is closed) or END (closed as asked).
        """
        turn = request.session
        with self._lock:
            session = self._sessions.find(turn) if turn else None
        check_token_ids(request, self._runner.vocab_size)
        limit = self.settings.max_tokens_limit
        if request.sampling.max_tokens > limit:
            raise invalid("max_tokens", request.sampling.max_tokens, f"at most {limit}")
        sampling = self._complete(request.sampling)
        now = self._clock()
        generation = Generation(request, sampling, sink, token_bytes=self._token_bytes, now=now)
        generation.session = session
        with self._lock:
            if self._refusal is not None:
                raise EngineError(ErrorCode.UNAVAILABLE, self._refusal)
            if self._num_waiting >= self.settings.max_queue:
                message = f"the queue is full: {self.settings.max_queue} requests wait, the limit"
                raise EngineError(ErrorCode.UNAVAILABLE, message)
            if request.request_id in self._live:
                raise invalid("request_id", request.request_id, "not that of a living request")
            self._check_fit(generation)
            generation.arrival = next(self._arrival)
            self._live[request.request_id] = generation
            self._unfinished += 1
            if request.deadline is not None:
                self._deadlines.push(generation, request.deadline)
            if self._sessions.enqueue(generation, now):
                self._arrivals.append(generation)
                self._wake.notify()

    def abort(self, request_id: str) -> bool:
        """Cancels a request: within one step it ends as CANCELLED and holds nothing any more.

        Its last event brings the tokens not sent yet; its session holds what was streamed.

        Returns:
          Whether such a request lives.
        """
        error = EngineError(ErrorCode.CANCELLED, f"request {request_id!r} was cancelled")
        with self._lock:
            generation = self._live.get(request_id)
            if generation is None:
                return False
            self._aborts.append((generation, error))
            self._wake.notify()
        return True

    def close_session(self, correlation_id: CorrelationId) -> bool:
        """Closes a session as END does; its unfinished turns go on. False if it is not open."""
        with self._lock:
            return self._sessions.close(correlation_id)

    def drain(self, grace_seconds: float = 0.0) -> bool:
        """Takes no more requests in, and waits until none is left. Not for sinks to call.

        Args:
          grace_seconds: what is not finished by then ends with UNAVAILABLE.

        Returns:
          Whether the engine is empty: False only if the device does not answer.
        """
        message = "the engine is draining"
        with self._lock:
            self._refusal = self._refusal or message
            if not self._empty.wait_for(self._is_empty, grace_seconds):
                error = EngineError(ErrorCode.UNAVAILABLE, message)
                self._aborts += [(generation, error) for generation in self._live.values()]
                self._wake.notify()
            return self._empty.wait_for(self._is_empty, STOP_TIMEOUT)

    def close(self) -> None:
        """Ends all requests with UNAVAILABLE and the scheduler thread. Not for sinks to call."""
        with self._lock:
            self._refusal = "the engine is closed"
            self._closing = True
            self._wake.notify()
        self._thread.join(STOP_TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stats(self) -> EngineStats:
        """The engine's numbers now. Each is right; together they may be a moment apart."""
        with self._lock:
            waiting, sessions = self._num_waiting, len(self._sessions)
        meter = self._meter
        return EngineStats(
            healthy=self.healthy,
            draining=self._refusal is not None,
            running=self._scheduler.num_running,
            waiting=waiting,
            sessions=sessions,
            slots=self._runner.num_slots,
            pages_used=self._pages.held,
            pages_cached=self._pages.idle,
            pages_total=self._pages.num_pages,
            prompt_tokens=meter.prompt_tokens,
            generation_tokens=meter.generation_tokens,
            prefix_hit_tokens=meter.prefix_hit_tokens,
            preemptions=meter.preemptions,
            steps=meter.steps,
            compilations=self._runner.num_compilations,
            finished=dict(meter.finished),
        )

    @property
    def _num_waiting(self) -> int:
        return len(self._arrivals) + self._scheduler.num_waiting + self._sessions.num_queued

    def _is_empty(self) -> bool:
        return self._unfinished == 0

    def _complete(self, sampling: SamplingParams) -> SamplingParams:
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        end_ids = self._end_ids if sampling.end_ids is None else sampling.end_ids
        return dataclasses.replace(sampling, seed=seed, end_ids=end_ids)

    def _check_fit(self, generation: Generation) -> None:
        used = 0 if generation.session is None else len(generation.session.history)
        pool = self._pages.num_pages * self._pages.page_size
        check_fit(used, generation.request, min(self._runner.context_length, pool))

    # What follows runs on the scheduler thread.

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        idle = False
        try:
            while True:
                with self._lock:
                    if idle and not (self._arrivals or self._aborts or self._closing):
                        self._wake.wait(IDLE_TICK)
                    if self._closing:
                        break
                idle = not self._turn()
            reason = EngineError(ErrorCode.UNAVAILABLE, "the engine is closed")
        except Exception as cause:
            logger.exception("the engine has failed")
            reason = EngineError(ErrorCode.INTERNAL, f"the engine has failed: {cause}")
            self._broken = True
            with self._lock:
                self._refusal = reason.message
        for generation in list(self._live.values()):
            try:
                self._scheduler.finish(generation, FinishReason.ERROR, reason)
            except Exception:  # a defect of the bookkeeping; the caller must hear of it even so
                logger.exception("request %r left unclean", generation.request.request_id)
                generation.finish(FinishReason.ERROR, reason)
        self._arrivals.clear()
        self._aborts.clear()

    def _turn(self) -> bool:
        """Takes in what callers asked for since the last turn, and does a step; False if idle."""
        now = self._clock()
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            endings, self._aborts = self._aborts, []
            while (first := self._deadlines.first()) and first[0] <= now:
                self._deadlines.remove(first[1])
                endings.append((first[1], self._too_late(first[1], now)))
            self._sessions.expire(now)
        self._pages.expire(now - self.settings.page_idle_time)
        for generation in filter(self._lives, arrivals):
            try:
                self._check_fit(generation)  # a session's history may have grown since
                self._scheduler.add(generation)
            except EngineError as refusal:
                endings.append((generation, refusal))
        for generation, error in endings:
            if self._lives(generation):
                cancelled = error.code is ErrorCode.CANCELLED
                reason = FinishReason.CANCELLED if cancelled else FinishReason.ERROR
                self._scheduler.finish(generation, reason, error)
        return self._scheduler.step()

    def _lives(self, generation: Generation) -> bool:
        return self._live.get(generation.request.request_id) is generation

    def _too_late(self, generation: Generation, now: float) -> EngineError:
        deadline = generation.request.deadline
        if deadline is not None and deadline <= now:
            message = "the request's deadline has passed"
        else:
            limit = self.settings.max_generation_time
            message = f"the request ran longer than the limit of {limit:g} s"
        return EngineError(ErrorCode.DEADLINE_EXCEEDED, message)

    def _admitted(self, generation: Generation) -> None:
        if generation.started_at is not None:
            return  # it was preempted in between
        generation.started_at = now = self._clock()
        self._meter.started(generation, now)
        end = now + self.settings.max_generation_time
        deadline = generation.request.deadline
        with self._lock:
            self._deadlines.push(generation, end if deadline is None else min(end, deadline))

    def _finished(
        self,
        generation: Generation,
        reason: FinishReason,
        error: EngineError | None,
        text_trim: int,
    ) -> None:
        now = self._clock()
        with self._lock:
            del self._live[generation.request.request_id]
            self._deadlines.remove(generation)
            if generation.session is not None:
                if generation.begun and (error is None or generation.num_output):
                    known = generation.tokens[: generation.length]
                    generation.session.keep(known, generation.tail_end)
                follower = self._sessions.leave(generation, now)
                if follower is not None:
                    self._arrivals.append(follower)
        self._meter.ended(generation, reason, now)
        generation.finish(reason, error, text_trim)
        with self._lock:
            self._unfinished -= 1
            self._empty.notify_all()
