"""The probe: what it calls healthy of the real server, and of servers that only pretend."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from generation import Stream, eventually, metric
from tritonclient.grpc import service_pb2_grpc

from grok1_backend.cli import main
from grok1_backend.server.options import free_ports


def health(url: str, timeout: float = 30) -> int:
    return main(["health", "--url", url, "--timeout", str(timeout)])


class Pretender(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every request alike; without words, not at all."""

    def __init__(self, code: grpc.StatusCode, words: str | None) -> None:
        self._code = code
        self._words = words
        self.stopped = threading.Event()
        self.asked: list[Any] = []

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        if self._words is None:
            self.stopped.wait()
        context.abort(self._code, self._words or "")


@contextlib.contextmanager
def pretending(
    words: str | None, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
) -> Iterator[tuple[str, Pretender]]:
    servicer = Pretender(code, words)
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", servicer
        finally:
            servicer.stopped.set()
            server.stop(None).wait()


def test_a_server_that_works(grpc_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(grpc_url) == 0
    assert capsys.readouterr() == ("healthy\n", "")


def test_a_server_whose_slots_are_all_taken(
    grpc_url: str, metrics_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eventually(lambda: metric(metrics_url, "grok1_slots") > 0, 30)
    slots = int(metric(metrics_url, "grok1_slots"))
    with Stream(grpc_url) as stream:
        for _ in range(slots):
            stream.send("grok1_generate", text_input="And", max_tokens=8000, ignore_eos=True)
        assert eventually(lambda: metric(metrics_url, "grok1_requests_running") == slots, 30)
        assert health(grpc_url, 4) == 0
    assert "busy: the request's deadline has passed" in capsys.readouterr().out


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    url = f"127.0.0.1:{port}"
    assert health(url) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"grok1-backend: the server at {url} is not healthy: ")
    assert said.count("\n") == 1


def test_an_engine_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    with pretending(None) as (url, _):
        assert health(url, 0.5) == 1
    assert "is not healthy: no answer within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("the engine has failed: no device", grpc.StatusCode.UNAVAILABLE),
        ("the engine is draining", grpc.StatusCode.UNAVAILABLE),
        ("Stub process 'grok1_0_0' is not healthy.", grpc.StatusCode.INTERNAL),
    ],
)
def test_an_engine_that_cannot_serve(
    words: str, code: grpc.StatusCode, capsys: pytest.CaptureFixture[str]
) -> None:
    with pretending(words, code) as (url, _):
        assert health(url) == 1
    assert capsys.readouterr().err.endswith(f"is not healthy: {words}\n")


@pytest.mark.parametrize(
    "words",
    ["the queue is full: 1024 requests wait, the limit", "1024 prompts are at work, the limit"],
)
def test_a_queue_that_is_full(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pretending(words) as (url, _):
        assert health(url) == 0
    assert capsys.readouterr().out == f"healthy, but busy: {words}\n"


def test_what_is_asked_for() -> None:
    with pretending("the queue is full") as (url, pretender):
        health(url, 8)
    (asked,) = pretender.asked
    values = dict(zip((i.name for i in asked.inputs), asked.raw_input_contents, strict=True))
    assert asked.model_name == "grok1_complete"
    assert int.from_bytes(values["max_tokens"], "little") == 1
    assert int.from_bytes(values["priority"], "little") == 2**31 - 1
    assert asked.parameters["timeout"].int64_param == 4_000_000


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none(timeout: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert health("localhost:1", timeout) == 1
    assert "the timeout is" in capsys.readouterr().err


def test_a_probe_imports_no_jax() -> None:
    (port,) = free_ports(1)
    code = (
        "import sys; from grok1_backend.cli import main;"
        f"main(['health', '--url', '127.0.0.1:{port}']);"
        "print(sorted({'jax', 'haiku', 'sentencepiece', 'pytriton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
