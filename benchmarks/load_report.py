"""What perf_analyzer measured, as a table and a plot, from the exports of its profiles.

    python benchmarks/load_report.py EXPORT... [--plot FILE.svg]

An export is a file of `--profile-export-file`; each load in it (a concurrency, or a request rate)
is a row. What is counted:

* request: from sending a request to its last response;
* first token: from sending it to the first response with a token;
* inter-token: from a response with tokens to the next, shared equally among the tokens of that
  next one, so that a request's inter-token times add up to the time of its stream;
* rates: all responses, or tokens, over the time from the first request to the last response.

Tokens are known where the model has the output `num_output_tokens`, the number so far. Without it
each response counts as one token, and there is no rate of tokens. The other outputs are not read:
perf_analyzer exports an empty tensor as whatever lay in its memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = (
    *("export", "load", "requests", "responses/s", "tokens/s"),
    *("first token, ms", "inter-token, ms", "request, ms"),
)
PERCENTILES = (50, 90, 99)
AXES = {"concurrency": "concurrency", "request_rate": "requests/s"}
SECOND, MILLISECOND = 1e9, 1e6  # in nanoseconds, as an export's timestamps are


@dataclass(frozen=True)
class Load:
    """What one load gave; times are in milliseconds, one for each request or token."""

    export: str
    mode: str
    value: float
    responses_per_second: float
    tokens_per_second: float | None
    first_token: list[float]
    inter_token: list[float]
    request: list[float]

    @property
    def name(self) -> str:
        """The load in words, such as `concurrency 4`."""
        return _name(self.mode, self.value)


def read_loads(path: Path) -> list[Load]:
    """The loads of an export, in its order.

    Raises:
      ValueError: the file is not a whole export, or holds a load without a response.
    """
    try:
        experiments = json.loads(path.read_text(encoding="utf-8"))["experiments"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not a whole export of perf_analyzer: measure again ({error!r})"
        ) from error
    return [_load(path.stem, experiment) for experiment in experiments]


def _load(export: str, experiment: dict[str, Any]) -> Load:
    mode, value = experiment["experiment"]["mode"], experiment["experiment"]["value"]
    requests = [request for request in experiment["requests"] if request["response_timestamps"]]
    if not requests:
        raise ValueError(f"{export}, {_name(mode, value)}: no request got a response")
    first_token: list[float] = []
    inter_token: list[float] = []
    tokens = 0
    for request in requests:
        arrivals = list(_arrivals(request))
        tokens += sum(count for _, count in arrivals)
        first_token += [(time - request["timestamp"]) / MILLISECOND for time, _ in arrivals[:1]]
        for (before, _), (time, count) in pairwise(arrivals):
            inter_token += [(time - before) / count / MILLISECOND] * count
    last = max(request["response_timestamps"][-1] for request in requests)
    seconds = (last - min(request["timestamp"] for request in requests)) / SECOND
    told = any(map(_tells_tokens, requests))
    return Load(
        export=export,
        mode=mode,
        value=value,
        responses_per_second=sum(len(r["response_timestamps"]) for r in requests) / seconds,
        tokens_per_second=tokens / seconds if told else None,
        first_token=first_token,
        inter_token=inter_token,
        request=[(r["response_timestamps"][-1] - r["timestamp"]) / MILLISECOND for r in requests],
    )


def _name(mode: str, value: float) -> str:
    return f"concurrency {value:g}" if mode == "concurrency" else f"{value:g} {AXES[mode]}"


def _tells_tokens(request: dict[str, Any]) -> bool:
    return any("num_output_tokens" in outputs for outputs in request["response_outputs"])


def _arrivals(request: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Time and number of the tokens of each response that has any."""
    if not _tells_tokens(request):
        yield from ((time, 1) for time in request["response_timestamps"])
        return
    so_far = 0
    responses = zip(request["response_timestamps"], request["response_outputs"], strict=True)
    for time, outputs in responses:
        # An empty final response has no outputs; a request of several prompts has a list.
        total = int(np.sum(outputs.get("num_output_tokens", so_far)))
        if total > so_far:
            yield time, total - so_far
        so_far = total


def table(loads: Sequence[Load]) -> str:
    """The loads as a Markdown table; times as percentiles 50 / 90 / 99."""
    rows = [
        COLUMNS,
        *(
            (
                load.export,
                load.name,
                str(len(load.request)),
                f"{load.responses_per_second:.1f}",
                "-" if load.tokens_per_second is None else f"{load.tokens_per_second:.1f}",
                *map(_percentiles, (load.first_token, load.inter_token, load.request)),
            )
            for load in loads
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, row, widths)) + " |"  # one width for a column
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _percentiles(times: list[float]) -> str:
    if not times:
        return "-"  # as the inter-token times of answers in one response
    return " / ".join(f"{time:.1f}" for time in np.percentile(times, PERCENTILES))


def plot(loads: Sequence[Load], target: Path) -> None:
    """Draws rate, first token and inter-token time against the load; a line for each export."""
    try:
        import matplotlib  # only here: the table must not need it
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install --require-hashes -r requirements/bench.txt")
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    titles = ("tokens/s (responses/s where unknown)", "first token, ms", "inter-token, ms")
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, loc="left")
        panel.set_xlabel(", ".join(sorted({AXES[load.mode] for load in loads})))
    lines = dict.fromkeys((load.export, load.mode) for load in loads)
    for color, (export, mode) in enumerate(lines):
        line = sorted(
            (load for load in loads if (load.export, load.mode) == (export, mode)),
            key=lambda load: load.value,
        )
        values = [load.value for load in line]
        rates = [load.tokens_per_second or load.responses_per_second for load in line]
        axes[0].plot(values, rates, "o-", color=f"C{color}", label=export)
        for panel, kind in zip(axes[1:], ("first_token", "inter_token"), strict=True):
            for percentile, style in ((50, "o-"), (99, "o:")):
                times = [
                    np.percentile(getattr(load, kind) or [np.nan], percentile) for load in line
                ]
                label = f"{export}, p{percentile}"
                panel.plot(values, times, style, color=f"C{color}", label=label)
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Prints the table, and draws the plot where one is asked for."""
    parser = argparse.ArgumentParser(description="Table and plot of perf_analyzer's exports.")
    parser.add_argument("exports", nargs="+", type=Path, metavar="EXPORT")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    arguments = parser.parse_args()
    try:
        loads = [load for path in arguments.exports for load in read_loads(path)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"Times are percentiles {' / '.join(map(str, PERCENTILES))}.\n\n{table(loads)}")
    if arguments.plot:
        plot(loads, arguments.plot)


if __name__ == "__main__":
    main()
