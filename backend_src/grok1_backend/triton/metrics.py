"""The engine's numbers on Triton's /metrics page.

The scheduler thread must not wait for Triton, and each number is a message to the server: what it
observes is kept, and a thread of this module's own hands it on a few times a second.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from grok1_backend.engine.requests import FinishReason
from grok1_backend.engine.stats import EngineStats, Observer

logger = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two updates."""
_MAX_KEPT = 100_000
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Gauge:
    """A number of the engine's state."""

    name: str
    description: str
    read: Callable[[EngineStats], float]


@dataclass(frozen=True)
class Counter:
    """A total since the engine's start; with `labels`, one for each."""

    name: str
    description: str
    read: Callable[[EngineStats], Mapping[str, float]]
    """Label value to total; the only key is empty where there is no label."""
    label: str = ""
    values: tuple[str, ...] = ("",)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Observations, in buckets."""

    name: str
    description: str
    buckets: tuple[float, ...] = _SECONDS


GAUGES = (
    Gauge("grok1_requests_running", "Requests in slots.", lambda s: s.running),
    Gauge("grok1_requests_waiting", "Requests that wait for a slot.", lambda s: s.waiting),
    Gauge("grok1_sessions", "Open sequences.", lambda s: s.sessions),
    Gauge("grok1_slots", "Rows of the decode batch.", lambda s: s.slots),
    Gauge("grok1_kv_pages_used", "KV pages that requests hold.", lambda s: s.pages_used),
    Gauge("grok1_kv_pages_cached", "KV pages kept for reuse alone.", lambda s: s.pages_cached),
    Gauge("grok1_kv_pages", "KV pages in all.", lambda s: s.pages_total),
    Gauge("grok1_healthy", "0 once the engine has failed for good.", lambda s: s.healthy),
)
COUNTERS = (
    Counter(
        "grok1_prompt_tokens_total",
        "Prompt tokens of admitted requests, earlier turns included.",
        lambda s: {"": s.prompt_tokens},
    ),
    Counter("grok1_generation_tokens_total", "Tokens drawn.", lambda s: {"": s.generation_tokens}),
    Counter(
        "grok1_prefix_hit_tokens_total",
        "Prompt tokens whose KV was reused.",
        lambda s: {"": s.prefix_hit_tokens},
    ),
    Counter(
        "grok1_preemptions_total",
        "Requests that lost their slot to be resumed later.",
        lambda s: {"": s.preemptions},
    ),
    Counter(
        "grok1_compilations_total",
        "Programs compiled since the engine was ready, which held requests up.",
        lambda s: {"": s.compilations},
    ),
    Counter(
        "grok1_requests_total",
        "Requests that have ended, by how.",
        lambda s: {reason.value: count for reason, count in s.finished.items()},
        "finish_reason",
        tuple(reason.value for reason in FinishReason),
    ),
)
QUEUE = Histogram("grok1_queue_seconds", "From submission to the first slot.")
FIRST_TOKEN = Histogram("grok1_time_to_first_token_seconds", "From submission to the first token.")
INTER_TOKEN = Histogram(
    "grok1_inter_token_seconds",
    "From one token of a request to the next; the requests of a step count once, with their mean.",
)
REQUEST = Histogram("grok1_request_seconds", "From submission to the end.")
STEP_ROWS = Histogram("grok1_step_rows", "Slots that decode in a step.", _ROWS)
HISTOGRAMS = (QUEUE, FIRST_TOKEN, INTER_TOKEN, REQUEST, STEP_ROWS)


class MetricsObserver(Observer):
    """Keeps what the engine tells until it is taken."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Histogram, float]] = deque(maxlen=_MAX_KEPT)

    def take(self) -> list[tuple[Histogram, float]]:
        """What was observed since the last call."""
        return [self._kept.popleft() for _ in range(len(self._kept))]

    def admitted(self, queue_seconds: float) -> None:
        self._kept.append((QUEUE, queue_seconds))

    def first_token(self, seconds: float) -> None:
        self._kept.append((FIRST_TOKEN, seconds))

    def next_tokens(self, seconds: Sequence[float]) -> None:
        # One message to the server for each token would be too many.
        self._kept.append((INTER_TOKEN, statistics.fmean(seconds)))

    def finished(self, reason: FinishReason, seconds: float) -> None:  # noqa: ARG002
        self._kept.append((REQUEST, seconds))

    def step(self, rows: int, prefill_tokens: int) -> None:  # noqa: ARG002
        self._kept.append((STEP_ROWS, rows))


class Metrics:
    """Writes the numbers of one engine to Triton, labelled with model and version."""

    def __init__(
        self,
        labels: Mapping[str, str],
        stats: Callable[[], EngineStats],
        observer: MetricsObserver,
    ) -> None:
        """Makes the metrics and starts the thread.

        Args:
          labels: of every metric.
          stats: of the engine.
          observer: that the engine tells.
        """
        self._stats = stats
        self._observer = observer
        kind = pb_utils.MetricFamily
        self._families: list[Any] = []  # Triton drops a family's metrics with the family

        def family(metric: Gauge | Counter | Histogram, metric_kind: Any) -> Any:
            made = kind(name=metric.name, description=metric.description, kind=metric_kind)
            self._families.append(made)
            return made

        self._gauges = {
            gauge: family(gauge, kind.GAUGE).Metric(labels=dict(labels)) for gauge in GAUGES
        }
        self._counters: dict[tuple[Counter, str], Any] = {}
        for counter in COUNTERS:
            made = family(counter, kind.COUNTER)
            for value in counter.values:
                own = {counter.label: value} if counter.label else {}
                self._counters[counter, value] = made.Metric(labels={**labels, **own})
        self._written = dict.fromkeys(self._counters, 0.0)
        self._shown: dict[Gauge, float] = {}
        self._histograms = {
            histogram: family(histogram, kind.HISTOGRAM).Metric(
                labels=dict(labels), buckets=list(histogram.buckets)
            )
            for histogram in HISTOGRAMS
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self._write()
            except Exception:
                logger.exception("metrics were not written")

    def _write(self) -> None:
        stats = self._stats()
        for (counter, value), metric in self._counters.items():
            total = counter.read(stats)[value]
            if total > self._written[counter, value]:
                metric.increment(total - self._written[counter, value])
                self._written[counter, value] = total
        for histogram, observed in self._observer.take():
            self._histograms[histogram].observe(observed)
        # Last: when they say that nothing runs, the rest has been told.
        for gauge, metric in self._gauges.items():
            number = float(gauge.read(stats))
            if self._shown.get(gauge) != number:
                metric.set(number)
                self._shown[gauge] = number
