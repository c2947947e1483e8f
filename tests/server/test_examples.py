"""Every client example runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(name: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / name), *arguments)


def test_grpc_stream(grpc_url: str) -> None:
    output = python("grpc_stream.py", "--url", grpc_url, "--temperature", "0", "And God said")
    assert output.startswith("And God said")
    assert len(output) > len("And God said") + 10


def test_grpc_sequence(grpc_url: str) -> None:
    lines = python("grpc_sequence.py", "--url", grpc_url, "In the beginning", " And", " But")
    contexts = [int(count) for count in re.findall(r"\((\d+) tokens of context\)", lines)]
    assert len(contexts) == 3
    assert contexts[0] < contexts[1] < contexts[2]


def test_asyncio_many(grpc_url: str) -> None:
    output = python("asyncio_many.py", "--url", grpc_url, "--count", "12")
    assert sorted(int(n) for n in re.findall(r"^\[(\d+)\]", output, re.MULTILINE)) == [*range(12)]


def test_http_generate_stream(http_url: str) -> None:
    output = python("http_generate_stream.py", "--url", http_url, "And God said")
    assert output.startswith("And God said")
    assert len(output) > len("And God said") + 10


def test_http_infer(http_url: str) -> None:
    output = python("http_infer.py", "--url", http_url.removeprefix("http://"), "In the", "And")
    assert re.search(r"^In the\|.*\(\d+ tokens\)\nAnd\|.*\(\d+ tokens\)$", output, re.MULTILINE)


def test_curl(http_url: str) -> None:
    output = run("sh", str(EXAMPLES / "curl.sh"), http_url, "And God said")
    assert output.count("data: ") > 1
    assert '"model_name":"grok1_complete"' in output


def test_custom_ensemble(http_url: str) -> None:
    url = http_url.removeprefix("http://")
    output = python("custom_ensemble/client.py", "--url", url, "The wicked and the")
    written = re.search(r"^written: (.*)$", output, re.MULTILINE)
    masked = re.search(r"^masked:  (.*)$", output, re.MULTILINE)
    assert written
    assert masked
    words = r"\b(damn|hell|wicked|sin)\b"
    assert masked[1] == re.sub(words, lambda m: "*" * len(m[0]), written[1], flags=re.IGNORECASE)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_says_how_it_is_used(name: str) -> None:
    assert "--url" in python(name, "--help")


def test_an_example_names_the_servers_error(grpc_url: str) -> None:
    command = [sys.executable, str(EXAMPLES / "grpc_stream.py"), "--url", grpc_url]
    done = subprocess.run(
        [*command, "--temperature", "-1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "temperature is -1.0" in done.stderr
