"""Writes the tables of docs/performance.md from `benchmarks/results/*.json`; nothing is typed in.

    python benchmarks/report.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is outside stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
Record = Mapping[str, Any]
"""A row as `results.Row.record` gives it."""


@dataclass(frozen=True)
class Target:
    """What a row's figure of ours is to be, as a multiple of another figure."""

    text: str
    row: str
    of: str
    """`floor`, `best peer`, the name of a peer, or `1` for the figure itself."""
    wanted: float
    of_row: str | None = None
    """The row that the other figure is of; None: the same."""
    at_most: bool = False

    def value(self, rows: Mapping[str, Record]) -> float | None:
        """None where one of the figures was not measured."""
        row, other = rows.get(self.row), rows.get(self.of_row or self.row)
        if row is None or other is None:
            return None
        if row is other and "peer" in row and self.of in ("best peer", row["peer_name"]):
            return row["ratio"]
        figures = {
            "1": 1.0,
            "floor": other.get("floor"),
            "best peer": other.get("peer"),
            **other.get("peers", {}),
        }
        reference = figures.get(self.of)
        return None if reference is None else row["ours"] / reference

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.at_most else value >= self.wanted


QUANTIZED = "int8, int8 embedding"
TARGETS = (
    Target("1 request, ÷ llama.cpp Q8_0", f"decode, 1 request, {QUANTIZED}", "llama.cpp Q8_0", 1.2),
    Target("1 request, ÷ floor", f"decode, 1 request, {QUANTIZED}", "floor", 0.75),
    Target("1 request, float32, ÷ llama.cpp F32", "decode, 1 request, float32", "llama.cpp F32", 1),
    Target("8 requests, ÷ best peer", f"decode, 8 requests, {QUANTIZED}", "best peer", 2),
    Target(
        "32 requests, ÷ llama.cpp Q8_0 at 8",
        f"decode, 32 requests, {QUANTIZED}",
        "llama.cpp Q8_0",
        3,
        of_row=f"decode, 8 requests, {QUANTIZED}",
    ),
    Target("prefill of 512, ÷ vLLM", "prefill, 512 tokens, int8", "vLLM Mixtral F32", 1.2),
    Target("prefill of 512, ÷ floor", "prefill, 512 tokens, int8", "floor", 0.7),
    *(
        Target(
            f"{front}, {where}, ÷ engine alone",
            f"{front}, 32 streams, {where}",
            "engine alone",
            0.9,
        )
        for where in ("bench model", "bench model, engine on its own core")
        for front in ("grok1_generate", "grok1_ensemble")
    ),
    Target("warm start, CPU s", "start-up, warm, CPU", "1", 10, at_most=True),
)


REASONS = {
    "decode, 1 request, int8": "the released float embedding, which Q8_0 rounds to int8, is two "
    "thirds of what the step reads",
}
"""Why a row may be behind its best peer, where that is known."""

FIGURES = {
    "bench": ("Decode and prefill: ours, the peers and the floor", ("decode", "prefill")),
    "engine": ("Decode steps by slots, and token gaps under a long prompt", ("engine",)),
    "scale": ("Time of a step by slots, context, pages and waiting requests", ("scale",)),
}
"""Name of a figure, which `plots.py` draws, to its caption and the parts that it needs."""


def load(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The files of runs by name; those of other scripts are lists and are left out."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    return {name: run for name, run in files.items() if isinstance(run, dict) and "rows" in run}


def number(value: float | None) -> str:
    """Three significant digits, and never an exponent."""
    if value is None:
        return ""
    digits = f"{value:.3g}"
    return f"{value:.0f}" if "e" in digits else digits


def figure(value: float | None, unit: str) -> str:
    """A figure in a unit that suits its size."""
    if value is not None and unit == "s" and value < 1:
        return f"{number(value * 1e3)} ms"
    return f"{number(value)} {unit}" if value is not None else ""


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, without the columns that are empty in all lines."""
    kept = [i for i, _ in enumerate(header) if any(line[i] for line in lines)]
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in rows)


def comparison(rows: Sequence[Record]) -> str:
    """Ours, the best peer and the floor, and the two ratios; a sole peer is named at the top."""
    names = {row["peer_name"] for row in rows if "peer" in row}
    sole = names.pop() if len(names) == 1 else None
    lines = []
    for row in rows:
        unit, details = row["unit"], row["details"]
        named = "" if sole or "peer" not in row else f" ({row['peer_name']})"
        lines.append(
            [
                row["name"],
                figure(row["ours"], unit),
                figure(row.get("peer"), unit) + named,
                f"**{number(row['ratio'])}**" if "ratio" in row else "",
                figure(row.get("floor"), unit),
                f"{row['floor_ratio']:.0%}" if "floor_ratio" in row else "",
                number(details.get("experts_touched")),
                number(details.get("kv_length")),
                number(details.get("responses_per_token")),
            ]
        )
    header = ["what", "ours", sole or "best peer", f"ours ÷ {sole or 'peer'}", "floor"]
    conditions = ("experts touched", "KV length", "responses a token")
    return markdown([*header, "ours ÷ floor", *conditions], lines)


def growth(rows: Sequence[Record]) -> str:
    """What a figure is at each point of an axis; a line for each figure and axis."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        details = row["details"]
        point = f"{details['at']:,}: {figure(row['ours'], row['unit'])}"
        lines.setdefault((details["what"], details["by"]), []).append(point)
    return markdown(
        ["what", "by", "at: time"],
        [[what, by, "; ".join(points)] for (what, by), points in lines.items()],
    )


def peers(rows: Sequence[Record]) -> str:
    """Each peer's figure."""
    names = sorted({name for row in rows for name in row.get("peers", ())})
    lines = [
        [row["name"], *(figure(row["peers"].get(name), row["unit"]) for name in names)]
        for row in rows
        if "peers" in row
    ]
    return markdown(["what", *names], lines) if lines else "No peer was measured."


def behind(rows: Sequence[Record]) -> str:
    """Names each row where a peer is ahead."""
    found = [
        f"* {row['name']}: {number(row['ratio'])} of {row['peer_name']}"
        + (f" ({REASONS[row['name']]})" if row["name"] in REASONS else "")
        for row in rows
        if "ratio" in row and (row["ratio"] < 1) == ("/" in row["unit"])
    ]
    return "\n".join(found) or "No row with a peer is behind it."


def targets(rows: Sequence[Record]) -> str:
    """Each target, what was reached, and whether that is enough."""
    by_name = {row["name"]: row for row in rows}
    lines = []
    for target in TARGETS:
        value = target.value(by_name)
        bound = ("at most " if target.at_most else "at least ") + number(target.wanted)
        verdict = "not measured" if value is None else "yes" if target.met(value) else "**no**"
        lines.append([target.text, bound, number(value) or "-", verdict])
    return markdown(["target", "wanted", "reached", "met"], lines)


def machine(run: Mapping[str, Any]) -> str:
    """Where and with what a run was made."""
    found, row = run["machine"], run["rows"][0]
    versions = [f"{name} {version}" for name, version in row["peer_versions"].items()]
    float32 = f"{number(found['float32_flop_per_s'] / 1e9)} GFLOP/s (a large product in JAX)"
    int8 = f"{number(found['int8_op_per_s'] / 1e12)} TOP/s ({found['int8_instruction']})"
    lines = [
        f"{found['processor']}, {found['cores']} cores, {', '.join(found['instruction_sets'])}",
        f"reads {number(found['bytes_per_s'] / 1e9)} GB/s",
        f"multiplies float32 at {float32}, and int8 on registers at {int8}",
        f"commit `{row['commit']}` on JAX {run['ours']['jax']}, kernels: {run['ours']['kernels']}",
        f"peers: {', '.join(versions) or 'none'}",
        *(f"left out: {name} ({why})" for name, why in run["missing"].items()),
    ]
    return "\n".join(f"* {line}" for line in lines)


def tables(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every table by name; only those whose results are there."""
    rows = {name: run["rows"] for name, run in runs.items()}
    everything = [row for part in rows.values() for row in part]
    compared = [row for name in ("decode", "prefill", "first_token") for row in rows.get(name, ())]
    made = {name: comparison(part) for name, part in rows.items()}
    if "scale" in rows:
        made["scale"] = growth(rows["scale"])
    if "serving" in rows:
        made["serving"] = comparison([row for row in rows["serving"] if "ratio" in row])
        made["serving_cpu"] = comparison([row for row in rows["serving"] if "ratio" not in row])
    if compared:
        made |= {"peers": peers(compared), "behind": behind(compared)}
    if "decode" in runs:
        made["machine"] = machine(runs["decode"])
    for name, (caption, needed) in FIGURES.items():
        if all(part in runs for part in needed):
            made[f"figure {name}"] = f"![{caption}](images/{name}.svg)"
    return made | {"targets": targets(everything)}


def fill(page: str, made: Mapping[str, str]) -> str:
    """The page with its tables written anew.

    Raises:
      ValueError: the page has no place for a table.
    """
    for name, table in made.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        if not found:
            raise ValueError(f"the page has no place for the table {name}")
        page = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill(page, tables(load())), encoding="utf-8")


if __name__ == "__main__":
    main()
