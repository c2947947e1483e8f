"""Draws the figures of docs/performance.md from `benchmarks/results/*.json`.

    python benchmarks/plots.py

Needs matplotlib: `pip install --require-hashes -r requirements/bench.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from report import FIGURES, Record, load
from results import ROOT

IMAGES = ROOT / "docs" / "images"
OURS, FLOOR = "#4c78a8", "#e45756"
PEERS = {
    "llama.cpp F32": "#bab0ac",
    "llama.cpp Q8_0": "#79706e",
    "vLLM Mixtral F32": "#f2cf5b",
    "Transformers Mixtral F32": "#d8b5a5",
}


def engines(axes: Any, rows: Sequence[Record], cut: str, title: str) -> None:
    """A group of bars for each row: ours and the peers, with a line at the floor."""
    place, ticks = 0.0, []
    for row in rows:
        bars = {"ours": row["ours"], **row.get("peers", {})}
        for i, (name, value) in enumerate(bars.items()):
            drawn = axes.barh(place + i, value, color=PEERS.get(name, OURS), label=name)
            axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
        ends = place - 0.5, place + len(bars) - 0.5
        axes.plot([row["floor"]] * 2, ends, color=FLOOR, label="floor")
        ticks.append((sum(ends) / 2, row["name"].removeprefix(cut)))
        place += len(bars) + 0.6
    axes.set_yticks([tick for tick, _ in ticks], [name for _, name in ticks])
    axes.set_title(title, loc="left")
    axes.margins(x=0.15)
    axes.invert_yaxis()


def against_others(runs: Mapping[str, Any]) -> Any:
    """Decode and prefill beside the peers and the floor."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 5))
    for axes, part in zip(panels, ("decode", "prefill"), strict=True):
        engines(axes, runs[part]["rows"], f"{part}, ", f"{part}, tokens/s")
    labels: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def bars(axes: Any, rows: Sequence[Record], cut: str, title: str) -> None:
    """One bar for each row's ratio; `cut` is what all names begin with."""
    names = [row["name"].removeprefix(cut).strip() for row in rows]
    drawn = axes.barh(names, [row["ratio"] for row in rows], color=OURS)
    axes.bar_label(drawn, fmt="%.2f x", padding=3)
    axes.set_title(title, loc="left")
    axes.margins(x=0.2)
    axes.invert_yaxis()


def engine_parts(runs: Mapping[str, Any]) -> Any:
    """Decode steps by slots, and token gaps under a long prompt."""
    rows = runs["engine"]["rows"]
    decode = [row for row in rows if row["name"].startswith("decode step")]
    gaps = [row for row in rows if row["name"].startswith("longest gap")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 2.6))
    bars(left, decode, "decode step,", "time of a decode step, against one slot")
    bars(right, gaps, "longest gap,", "longest token gap, against no long prompt")
    figure.tight_layout()
    return figure


def scale(runs: Mapping[str, Any]) -> Any:
    """How steps and admissions grow, a panel for each thing that does; a slope of 1 is linear."""
    rows = runs["scale"]["rows"]
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.4), sharey=True)
    axes_names = dict.fromkeys(row["details"]["by"] for row in rows)
    lines = dict.fromkeys(row["details"]["what"] for row in rows)
    for axes, by in zip(panels, axes_names, strict=True):
        for what in lines:
            line = [
                row for row in rows if (row["details"]["what"], row["details"]["by"]) == (what, by)
            ]
            times = [row["ours"] * (1e6 if row["unit"] == "s" else 1) for row in line]
            axes.plot([row["details"]["at"] for row in line], times, "o-", label=what)
        axes.set_xscale("symlog" if by == "waiting requests" else "log", base=10)
        axes.set_yscale("log")
        axes.set_xlabel(by)
    panels[0].set_ylabel("microseconds")
    panels[-1].legend(fontsize="small")
    figure.tight_layout()
    return figure


DRAWN = {"bench": against_others, "engine": engine_parts, "scale": scale}
"""Name of a figure of `report.FIGURES` to what draws it."""


def main() -> None:
    """Writes the figures whose results are there."""
    runs = load()
    plt.rcParams["svg.hashsalt"] = "grok1"  # the same data give the same file
    IMAGES.mkdir(exist_ok=True)
    for name, (_, needed) in FIGURES.items():
        if all(part in runs for part in needed):
            save(DRAWN[name](runs), IMAGES / f"{name}.svg")


def save(figure: Any, path: Path) -> None:
    """The file of a figure, without the time of day."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
