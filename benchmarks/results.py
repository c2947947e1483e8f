"""What a measurement leaves behind: rows of a comparison, and the file that they are written to.

Every row is a median of interleaved rounds and keeps the samples. `ratio` is ours over the best
peer and `floor_ratio` ours over the floor, so with rates more is better and with times less.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured thing."""

    name: str
    unit: str
    """`tokens/s`, `s`, ...: one with a slash is a rate, of which more is better."""
    ours: Sequence[float]
    """Samples in the order in which they were taken."""
    peers: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """Name of a peer to its samples."""
    floor: float | None = None
    """What the machine allows at best, in the unit."""
    paired: bool = False
    """Whether samples of one place were taken next to each other: then the ratio is the median of
    theirs, and what slows the machine for a while slows both sides of it."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What belongs to the conditions: KV length, experts touched, bytes read, ..."""

    def __post_init__(self) -> None:
        if not self.ours:
            raise ValueError(f"{self.name}: no samples")

    @property
    def more_is_better(self) -> bool:
        return "/" in self.unit

    def record(self) -> dict[str, Any]:
        """The row as it is written; `ratio` and `peer` are there only where a peer was measured."""
        ours = statistics.median(self.ours)
        medians = {name: statistics.median(samples) for name, samples in self.peers.items()}
        record: dict[str, Any] = {"name": self.name, "unit": self.unit, "ours": ours}
        if medians:
            best = (max if self.more_is_better else min)(medians, key=medians.__getitem__)
            ratio = ours / medians[best]
            if self.paired:
                pairs = zip(self.ours, self.peers[best], strict=True)
                ratio = statistics.median(own / other for own, other in pairs)
            record |= {"peer": medians[best], "peer_name": best, "ratio": ratio}
            record["peers"] = medians
        if self.floor is not None:
            record |= {"floor": self.floor, "floor_ratio": ours / self.floor}
        samples = {name: list(values) for name, values in self.peers.items()}
        record["samples"] = {"ours": list(self.ours)} | samples
        record["details"] = dict(self.details)
        return record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What all rows of a run share."""

    machine: Mapping[str, Any]
    """Processor, cores, instruction sets, and the rates that were measured (`machine.py`)."""
    ours: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What ours ran on: the version of JAX, and whether with the native kernels."""
    peer_versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Peers that were asked for and could not be measured, and why."""
    commit: str

    def write(self, name: str, rows: Sequence[Row], directory: Path = RESULTS) -> Path:
        """Writes `<name>.json` and returns its path. Each row says what it was measured on."""
        path = directory / f"{name}.json"
        directory.mkdir(parents=True, exist_ok=True)
        measured = {"commit": self.commit, "peer_versions": self.peer_versions}
        table = {
            "machine": self.machine,
            "ours": self.ours,
            "missing": self.missing,
            "rows": [row.record() | measured for row in rows],
        }
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return path


def commit() -> str:
    """The commit that is measured, with `+` where files differ from it; empty outside of git."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()
