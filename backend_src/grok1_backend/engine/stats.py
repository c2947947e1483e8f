"""What the engine tells about itself: numbers to read, and moments to observe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grok1_backend.engine.generation import Generation
from grok1_backend.engine.requests import FinishReason


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The state of the engine at one moment, and totals since its start."""

    healthy: bool
    draining: bool
    running: int
    """Requests in slots."""
    waiting: int
    """Requests without a slot: new, preempted, and behind a running turn of their session."""
    sessions: int
    slots: int
    pages_used: int
    """Pages that requests hold; shared ones count once."""
    pages_cached: int
    """Pages kept for reuse alone; given up when a request needs them."""
    pages_total: int
    prompt_tokens: int
    """Of admitted requests, a session's earlier turns included, each request once."""
    generation_tokens: int
    prefix_hit_tokens: int
    """Prompt tokens whose KV was found and not computed."""
    preemptions: int
    steps: int
    compilations: int
    """Since the engine was ready; each held requests up."""
    finished: Mapping[FinishReason, int]

    @property
    def cancellations(self) -> int:
        """Requests that were cancelled."""
        return self.finished[FinishReason.CANCELLED]


class Observer:
    """Moments of the engine, for histograms; this one ignores them. Seconds throughout.

    Called by the scheduler thread: must neither block nor raise.
    """

    def admitted(self, queue_seconds: float) -> None:
        """A request got its first slot."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after its submission."""

    def next_tokens(self, seconds: Sequence[float]) -> None:
        """The later tokens of a step came so long after the ones before them; not empty."""

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """A request ended so long after its submission."""

    def step(self, rows: int, prefill_tokens: int) -> None:
        """A step was dispatched: slots that decode, prompt tokens that are computed."""


class Meter:
    """Counts, and tells the observer. Written by the scheduler thread, read by any."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.finished = dict.fromkeys(FinishReason, 0)

    def started(self, generation: Generation, now: float) -> None:
        """A request got its first slot."""
        self.prompt_tokens += generation.num_prompt
        self.prefix_hit_tokens += generation.table.reused
        self._observer.admitted(now - generation.submitted_at)

    def preempted(self) -> None:
        """A request lost its slot."""
        self.preemptions += 1

    def stepped(self, rows: int, prefill_tokens: int) -> None:
        """A step was dispatched."""
        self.steps += 1
        self._observer.step(rows, prefill_tokens)

    def drawn(self, generations: Sequence[Generation], now: float) -> None:
        """Each of these requests got a new token from a step."""
        self.generation_tokens += len(generations)
        gaps: list[float] = []
        for generation in generations:
            seconds = generation.since_last_token(now)
            if generation.num_output == 1:
                self._observer.first_token(seconds)
            else:
                gaps.append(seconds)
        if gaps:
            self._observer.next_tokens(gaps)

    def ended(self, generation: Generation, reason: FinishReason, now: float) -> None:
        """A request has ended."""
        self.finished[reason] += 1
        self._observer.finished(reason, now - generation.submitted_at)
