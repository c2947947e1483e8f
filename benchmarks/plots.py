"""Draws the figures of docs/performance.md from `benchmarks/results/engine.json`.

    python benchmarks/engine.py --json benchmarks/results/engine.json
    python benchmarks/plots.py

Needs matplotlib: `pip install --require-hashes -r requirements/bench.txt`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine.json"
TARGET = ROOT / "docs" / "images" / "engine.svg"


def bars(axes: Any, rows: list[dict[str, Any]], cut: str, title: str) -> None:
    """One bar for each row's ratio; `cut` is what all names begin with."""
    names = [row["name"].removeprefix(cut).strip() for row in rows]
    drawn = axes.barh(names, [row["ratio"] for row in rows], color="#4c78a8")
    axes.bar_label(drawn, fmt="%.2f x", padding=3)
    axes.set_title(title, loc="left")
    axes.margins(x=0.2)
    axes.invert_yaxis()


def main() -> None:
    """Writes the figure."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    decode = [row for row in rows if row["name"].startswith("decode step")]
    gaps = [row for row in rows if row["name"].startswith("longest gap")]
    plt.rcParams["svg.hashsalt"] = "grok1"  # the same data give the same file
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 2.6))
    bars(left, decode, "decode step,", "time of a decode step, against one slot")
    bars(right, gaps, "longest gap,", "longest token gap, against no long prompt")
    figure.tight_layout()
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
