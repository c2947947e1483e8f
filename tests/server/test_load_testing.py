"""The load testing guide's commands run as they stand; the report says what the exports hold."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exports import export_of

from grok1_backend.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "benchmarks" / "load_report.py"
LOADS = {
    "concurrency": ["concurrency 1", "concurrency 5", "concurrency 9"],
    "rate": ["2 requests/s", "4 requests/s"],
    "sequences": ["concurrency 4"],
    "stream": ["concurrency 4"],
    "complete": ["concurrency 4"],
}
"""What the guide's commands measure, by export."""

START = 1_795_000_000_000_000_000  # a timestamp, in nanoseconds
MILLISECOND = 1_000_000

Rows = dict[tuple[str, str], dict[str, str]]


def commands(page: Path, program: str) -> list[str]:
    """The page's `sh` blocks that run the program."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for block in blocks if program in block]


def rows_of(table: str) -> Rows:
    """The report's rows by export and load, each by column."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {(row[0], row[1]): dict(zip(head, row, strict=True)) for row in rows}


def report(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the report, with a folder of modules that go before the installed ones."""
    return subprocess.run(
        [sys.executable, REPORT, *arguments],
        env=os.environ | ({"PYTHONPATH": str(path)} if path else {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def times(cell: str) -> list[float]:
    """The percentiles 50, 90 and 99, in milliseconds."""
    return [float(time) for time in cell.split(" / ")]


def request(start: int, *responses: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    """A request as it is exported; times in milliseconds, of responses from `start` on."""
    at = START + start * MILLISECOND
    return {
        "timestamp": at,
        "response_timestamps": [at + round(time * MILLISECOND) for time, _ in responses],
        "response_outputs": [outputs for _, outputs in responses],
    }


def write(path: Path, mode: str, value: float, requests: list[dict[str, Any]]) -> Path:
    experiment = {"experiment": {"mode": mode, "value": value}, "requests": requests}
    path.write_text(json.dumps({"experiments": [experiment]}), encoding="utf-8")
    return path


def so_far(tokens: int) -> dict[str, Any]:
    return {"num_output_tokens": tokens, "token_ids": 7}  # the latter also where there is none


def test_percentiles_of_requests_and_first_tokens(tmp_path: Path) -> None:
    # Requests 0 to 100: first token after i ms, whole after 2 i + 1 ms.
    requests = [request(0, (i, so_far(1)), (2 * i + 1, so_far(2))) for i in range(101)]
    rows = rows_of(report(write(tmp_path / "x.json", "concurrency", 101, requests)).stdout)
    row = rows["x", "concurrency 101"]
    assert row["requests"] == "101"
    assert times(row["first token, ms"]) == [50.0, 90.0, 99.0]
    assert times(row["request, ms"]) == [101.0, 181.0, 199.0]
    assert times(row["inter-token, ms"]) == [51.0, 91.0, 100.0]
    assert row["tokens/s"] == f"{202 / 0.201:.1f}"


def test_tokens_that_come_together_share_the_time(tmp_path: Path) -> None:
    # Tokens 2, 3 and 4 in one response; then one without a token, and an empty final one.
    stream = [(10, so_far(1)), (40, so_far(4)), (45, so_far(6)), (46, so_far(6)), (50, {})]
    rows = rows_of(
        report(write(tmp_path / "x.json", "request_rate", 2.5, [request(0, *stream)])).stdout
    )
    row = rows["x", "2.5 requests/s"]
    assert times(row["inter-token, ms"]) == [10.0, 10.0, 10.0]  # of 10, 10, 10, 2.5 and 2.5
    assert times(row["request, ms"])[0] == 50.0
    assert (row["tokens/s"], row["responses/s"]) == ("120.0", "100.0")


def test_one_response_with_all_tokens(tmp_path: Path) -> None:
    requests = [request(0, (100, so_far(8))), request(100, (100, so_far(8)))]
    rows = rows_of(report(write(tmp_path / "x.json", "concurrency", 1, requests)).stdout)
    row = rows["x", "concurrency 1"]
    assert (row["tokens/s"], row["responses/s"]) == ("80.0", "10.0")
    assert row["inter-token, ms"] == "-"
    assert row["first token, ms"] == row["request, ms"] == "100.0 / 100.0 / 100.0"


def test_a_request_of_several_prompts(tmp_path: Path) -> None:
    requests = [request(0, (100, {"num_output_tokens": [8, 3]}))]
    rows = rows_of(report(write(tmp_path / "x.json", "concurrency", 1, requests)).stdout)
    assert rows["x", "concurrency 1"]["tokens/s"] == "110.0"


def test_outputs_of_other_models(tmp_path: Path) -> None:
    requests = [request(0, (10, {"text": "a"}), (30, {"text": "b"}), (50, {"text": "c"}))]
    rows = rows_of(report(write(tmp_path / "x.json", "concurrency", 1, requests)).stdout)
    row = rows["x", "concurrency 1"]
    assert (row["tokens/s"], row["responses/s"]) == ("-", "60.0")
    assert times(row["inter-token, ms"]) == [20.0, 20.0, 20.0]


@pytest.mark.parametrize("text", ["", '{"experiments": [{"experiment":', "[]"])
def test_what_is_no_export(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    done = report(tmp_path / "x.json")
    assert done.returncode == 1
    assert "x.json is not a whole export" in done.stderr
    assert "Traceback" not in done.stderr


def test_requests_without_a_response(tmp_path: Path) -> None:
    done = report(write(tmp_path / "x.json", "concurrency", 3, [request(0)]))
    assert done.returncode == 1
    assert done.stderr == "x, concurrency 3: no request got a response\n"


def test_a_plot_without_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError", encoding="utf-8")
    export = write(tmp_path / "x.json", "concurrency", 1, [request(0, (1, so_far(1)))])
    assert report(export, path=tmp_path).returncode == 0
    done = report(export, "--plot", tmp_path / "x.svg", path=tmp_path)
    assert done.returncode == 1
    assert "requirements/bench.txt" in done.stderr


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in requirements/bench.txt alone")
    one = write(tmp_path / "x.json", "concurrency", 1, [request(0, (1, so_far(1)))])
    two = write(tmp_path / "y.json", "request_rate", 2, [request(0, (1, {}), (2, {}))])
    done = report(one, two, "--plot", tmp_path / "x.svg")
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "x.svg").read_text(encoding="utf-8")


class Guide:
    """A folder like the repository's root, where the pages' commands run against the server."""

    def __init__(self, folder: Path, server: TritonServer) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        options = server.options
        self._ports = {
            "localhost:8000": f"localhost:{options.http_port}",
            "localhost:8001": f"localhost:{options.grpc_port}",
        }

    def run(self, command: str) -> str:
        """What a command prints."""
        for told, real in self._ports.items():
            command = command.replace(told, real)
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, command + done.stdout + done.stderr
        return done.stdout

    def measure(self, command: str) -> None:
        """Runs perf_analyzer; its export is whole afterwards."""
        (export,) = (self.folder / name for name in re.findall(r"export-file (\S+)", command))
        export_of(lambda: self.run(command), export)


@pytest.mark.usefixtures("perf_analyzer")
def test_the_guide(server: TritonServer, tmp_path: Path) -> None:
    guide = Guide(tmp_path, server)
    page = ROOT / "docs" / "load-testing.md"
    guide.run(*commands(page, "mkdir"))
    for command in commands(page, "perf_analyzer"):
        guide.measure(command)
    whole, *_ = commands(page, "load_report.py")
    rows = rows_of(guide.run(whole))
    assert set(rows) == {(export, load) for export, loads in LOADS.items() for load in loads}
    for export, loads in LOADS.items():
        profile = json.loads((tmp_path / f"build/load/{export}.json").read_text(encoding="utf-8"))
        for load, experiment in zip(loads, profile["experiments"], strict=True):
            check(rows[export, load], experiment["requests"], streams=export != "complete")


def check(row: dict[str, str], requests: list[dict[str, Any]], *, streams: bool) -> None:
    """The row against the export's own numbers, put together another way."""
    first = min(request["timestamp"] for request in requests)
    last = max(max(request["response_timestamps"]) for request in requests)
    seconds = (last - first) / 1e9
    latency = [max(r["response_timestamps"]) - r["timestamp"] for r in requests]
    until_first = [min(r["response_timestamps"]) - r["timestamp"] for r in requests]
    tokens = [r["response_outputs"][-1]["num_output_tokens"] for r in requests]
    responses = sum(len(request["response_outputs"]) for request in requests)
    assert row["requests"] == str(len(requests))
    assert float(row["tokens/s"]) == pytest.approx(sum(tokens) / seconds, abs=0.06)
    assert float(row["responses/s"]) == pytest.approx(responses / seconds, abs=0.06)
    assert set(tokens) == {16}  # as benchmarks/prompts.json says
    for cell, expected in (("request, ms", latency), ("first token, ms", until_first)):
        assert times(row[cell])[0] == pytest.approx(statistics.median(expected) / 1e6, abs=0.06)
    if streams:
        assert responses > len(requests)
        assert 0 <= times(row["inter-token, ms"])[0] <= times(row["request, ms"])[2]
    else:
        assert responses == len(requests)
        assert row["inter-token, ms"] == "-"


@pytest.mark.usefixtures("perf_analyzer")
def test_the_readme_s_command(server: TritonServer, tmp_path: Path) -> None:
    (command,) = commands(ROOT / "README.md", "bin/perf_analyzer")
    assert "Request count:" in Guide(tmp_path, server).run(command)
