"""Rows and their ratios, and what the committed results must have."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from results import RESULTS, Row, Run

FIELDS = {"name", "unit", "ours", "samples", "details", "commit", "peer_versions"}
PEER_FIELDS = {"peer", "peer_name", "ratio", "peers"}
RATES = {"bytes_per_s", "float32_flop_per_s", "int8_op_per_s"}


def row(unit: str, **peers: list[float]) -> dict[str, Any]:
    return Row(name="row", unit=unit, ours=[3.0, 1.0, 2.0], peers=peers).record()


def test_a_row_is_the_median_and_keeps_the_samples() -> None:
    assert row("tokens/s") == {
        "name": "row",
        "unit": "tokens/s",
        "ours": 2.0,
        "samples": {"ours": [3.0, 1.0, 2.0]},
        "details": {},
    }


@pytest.mark.parametrize(("unit", "best", "ratio"), [("tokens/s", "fast", 0.25), ("s", "slow", 2)])
def test_the_ratio_is_to_the_best_peer(unit: str, best: str, ratio: float) -> None:
    """Of rates the highest is best, of times the lowest."""
    found = row(unit, fast=[8.0, 9.0, 1.0], slow=[1.0, 1.0, 5.0])
    assert found["peers"] == {"fast": 8.0, "slow": 1.0}
    assert (found["peer_name"], found["ratio"]) == (best, ratio)
    assert found["samples"]["fast"] == [8.0, 9.0, 1.0]


def test_the_floor_ratio_is_ours_over_the_floor() -> None:
    found = Row(name="row", unit="tokens/s", ours=[2.0], floor=8.0).record()
    assert (found["floor"], found["floor_ratio"]) == (8.0, 0.25)


def test_of_paired_samples_the_ratios_are_compared() -> None:
    """As where the machine becomes slower: each of ours is half of the peer's beside it."""
    found = Row(
        name="row",
        unit="tokens/s",
        ours=[4.0, 3.0, 1.0],
        peers={"it": [8.0, 5.0, 2.0]},
        paired=True,
    ).record()
    assert (found["ours"], found["peer"], found["ratio"]) == (3.0, 5.0, 0.5)


def test_a_row_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Row(name="row", unit="s", ours=[])


def test_a_run_is_written_with_its_commit(tmp_path: Path) -> None:
    run = Run(machine={"cores": 2}, missing={"an engine": "not there"}, commit="abc+")
    path = run.write("part", [Row(name="row", unit="s", ours=[1.0])], tmp_path)
    found = json.loads(path.read_text())
    assert path.name == "part.json"
    assert found["missing"] == {"an engine": "not there"}
    assert [(row["name"], row["commit"]) for row in found["rows"]] == [("row", "abc+")]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_complete(path: Path) -> None:
    run = json.loads(path.read_text())
    assert run["machine"].keys() >= RATES
    assert {"processor", "cores", "instruction_sets"} <= run["machine"].keys()
    assert run["rows"]
    for entry in run["rows"]:
        assert entry.keys() >= FIELDS, entry["name"]
        has = PEER_FIELDS & entry.keys()
        assert has == (PEER_FIELDS if len(entry["samples"]) > 1 else set()), entry["name"]
        assert entry["ours"] == statistics.median(entry["samples"]["ours"])
        for name, median in entry.get("peers", {}).items():
            assert median == statistics.median(entry["samples"][name])
