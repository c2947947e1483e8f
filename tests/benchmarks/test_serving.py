"""What a run through the server is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import serving


def sample(rate: float, responses: float = 1.0, **cpu: float) -> serving.Sample:
    return serving.Sample(rate=rate, cpu=cpu, responses=responses)


def test_each_run_is_compared_with_the_engine_before_and_after_it() -> None:
    samples = serving.Samples(
        alone=[sample(rate, engine=100) for rate in (10, 8, 6, 4, 2)],
        served=[
            *(sample(6, 1.0, server=2, idle=0), sample(3, 0.5, server=4, idle=0)),
            *(sample(4, 1.0, server=2, idle=0), sample(2, 1.0, server=6, idle=0)),
        ],
    )
    case = serving.Case(name="a model", directory=Path(), slots=None, requests=1, tokens=1)
    generate, ensemble, *cpu = [row.record() for row in serving.rows_of(case, samples)]
    assert generate["samples"] == {"ours": [6, 4], serving.ALONE: [9, 5]}
    assert ensemble["samples"] == {"ours": [3, 2], serving.ALONE: [7, 3]}
    assert generate["ratio"] == pytest.approx((6 / 9 + 4 / 5) / 2)
    assert ensemble["details"]["responses_per_token"] == 0.75
    assert generate["name"] == "grok1_generate, 32 streams, a model"
    assert {row["name"].partition("model, ")[2]: row["ours"] for row in cpu} == {
        "engine alone: engine": 100,
        "grok1_generate: server": 2,
        "grok1_ensemble: server": 5,
    }
