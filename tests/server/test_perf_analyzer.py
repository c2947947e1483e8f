"""Triton's load generator runs against the text models as its manual says, and no request fails."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from exports import export_of
from generation import eventually, metric

PROMPTS = ("In the beginning", "And it came to pass", "The king said unto")
TOKENS = 12
# Ends on its own after a count of requests, however slow and uneven the machine is.
MEASUREMENT = (
    "--concurrency-range=4",
    "--measurement-mode=count_windows",
    "--measurement-request-count=30",
    "--stability-percentage=999",
    "--max-trials=3",
)


def run(command: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The requests of a run, from the export of its profile."""
    data = [{"text_input": [text], "max_tokens": [TOKENS]} for text in PROMPTS]
    (folder / "input.json").write_text(json.dumps({"data": data}))
    export = folder / "profile.json"
    line = [
        *(command, *arguments, *MEASUREMENT),
        *(f"--input-data={folder / 'input.json'}", f"--profile-export-file={export}"),
    ]

    def measure() -> None:
        done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not re.search(r"fail|error", done.stdout + done.stderr, re.IGNORECASE), done.stdout

    requests: list[dict[str, Any]] = export_of(measure, export)["experiments"][0]["requests"]
    return requests


def ended_badly(metrics_url: str) -> float:
    with urlopen(metrics_url) as page:
        lines = page.read().decode()
    found = re.findall(
        r'^grok1_requests_total{finish_reason="(?:error|cancelled)".*} (\S+)$', lines, re.MULTILINE
    )
    return sum(map(float, found))


@pytest.mark.parametrize("model", ["grok1_ensemble", "grok1_generate", "grok1_complete"])
def test_a_run(
    perf_analyzer: str,
    grpc_url: str,
    http_url: str,
    metrics_url: str,
    tmp_path: Path,
    model: str,
) -> None:
    streams = model != "grok1_complete"
    where = (
        ("-i", "grpc", "--streaming", "-u", grpc_url)
        if streams
        else ("-i", "http", "-u", http_url.removeprefix("http://"))
    )
    tokens, bad = metric(metrics_url, "grok1_generation_tokens_total"), ended_badly(metrics_url)
    requests = run(perf_analyzer, tmp_path, "-m", model, *where)
    assert len(requests) >= 30
    assert all(request["response_timestamps"] for request in requests)
    if streams:
        assert max(len(request["response_timestamps"]) for request in requests) > 1
    drawn = len(requests) * TOKENS / 2  # some texts end earlier
    assert eventually(
        lambda: metric(metrics_url, "grok1_generation_tokens_total") - tokens > drawn, 2
    )
    assert ended_badly(metrics_url) == bad
