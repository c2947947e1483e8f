"""The engine's numbers reach Triton, and what watches them names only those that exist."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils

from grok1_backend.engine.requests import FinishReason
from grok1_backend.engine.stats import EngineStats
from grok1_backend.triton import metrics
from grok1_backend.triton.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics, MetricsObserver

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
STATS = EngineStats(
    healthy=True, draining=False, running=3, waiting=2, sessions=1, slots=4, pages_used=5,
    pages_cached=6, pages_total=7, prompt_tokens=8, generation_tokens=9, prefix_hit_tokens=10,
    preemptions=11, steps=12, compilations=0, finished=dict.fromkeys(FinishReason, 0),
)  # fmt: skip


class Metric:
    """Notes what it is told."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.name, self.labels = name, labels
        self.value = 0.0
        self.times_set = 0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value
        self.times_set += 1

    def increment(self, value: float) -> None:
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """All metrics that are made."""
    made: list[Metric] = []

    class Family:
        COUNTER, GAUGE, HISTOGRAM = range(3)

        def __init__(self, name: str, description: str, kind: int) -> None:
            assert description
            self._name, self._kind = name, kind

        def Metric(self, labels: dict[str, str], buckets: Any = None) -> Metric:
            assert (buckets is not None) == (self._kind == self.HISTOGRAM)
            made.append(Metric(self._name, labels))
            return made[-1]

    monkeypatch.setattr(pb_utils, "MetricFamily", Family, raising=False)
    monkeypatch.setattr(metrics, "PERIOD", 1000.0)  # the test writes by itself
    return made


def test_what_the_engine_says_is_written_once(written: list[Metric]) -> None:
    stats, observer = STATS, MetricsObserver()
    page = Metrics({"model": "m", "version": "1"}, lambda: stats, observer)
    observer.first_token(0.25)
    observer.step(3, 0)
    observer.next_tokens([0.1, 0.3])
    page._write()
    page._write()
    stats = dataclasses.replace(
        STATS, generation_tokens=19, finished={**STATS.finished, FinishReason.STOP: 2}
    )
    page._write()
    page.close()
    assert all(m.labels["model"] == "m" and m.labels["version"] == "1" for m in written)
    by_name = {metric.name: metric for metric in written if "finish_reason" not in metric.labels}
    assert by_name["grok1_requests_running"].value == 3
    assert by_name["grok1_requests_running"].times_set == 1
    assert by_name["grok1_generation_tokens_total"].value == 19
    assert by_name["grok1_time_to_first_token_seconds"].observed == [0.25]
    assert by_name["grok1_step_rows"].observed == [3]
    assert by_name["grok1_inter_token_seconds"].observed == [0.2]  # once for a step
    ended = {m.labels["finish_reason"]: m.value for m in written if "finish_reason" in m.labels}
    assert ended == {"stop": 2, "length": 0, "cancelled": 0, "error": 0}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yaml"])
def test_monitoring_names_only_metrics_that_exist(name: str) -> None:
    exist = {metric.name for metric in (*GAUGES, *COUNTERS)}
    exist |= {f"{h.name}_{part}" for h in HISTOGRAMS for part in ("bucket", "sum", "count")}
    used = set(re.findall(r"\bgrok1_\w+", (MONITORING / name).read_text()))
    assert used
    assert used <= exist


def test_the_dashboard_shows_every_metric() -> None:
    text = (MONITORING / "grafana.json").read_text()
    assert json.loads(text)["panels"]
    shown = [m.name for m in (*GAUGES, *COUNTERS, *HISTOGRAMS) if m.name != "grok1_healthy"]
    assert [name for name in shown if name not in text] == []
