"""What a stop does to running requests, and that a dead engine does not hinder it."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from generation import Stream
from tritonclient.utils import InferenceServerException

from grok1_backend.cli import main
from grok1_backend.server import TritonServer
from grok1_backend.server.drain import drain
from grok1_backend.server.options import free_ports
from servers import local_options, process_of

ECHO = Path(__file__).resolve().parent / "echo_repository"
ENDLESS = {"text_input": "And", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[TritonServer]:
    """A server that a test may stop, with the embedded model."""
    options = local_options(tmp_path, exit_timeout=1)
    with TritonServer(options, start_timeout=900) as running:
        yield running


def leftovers(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


@pytest.mark.server
def test_a_stream_ends_with_the_reason(own: TritonServer) -> None:
    with Stream(own.options.grpc_url) as stream:
        stream.send("grok1_generate", **ENDLESS)
        stream.receive()
        own.stop()
        with pytest.raises(InferenceServerException, match="the engine is draining"):
            list(stream.responses())
    assert leftovers(own.shared_memory_prefix) == []


@pytest.mark.server
def test_a_dead_engine(own: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(process_of(own, "grok1"), signal.SIGKILL)
    assert main(["health", "--url", own.options.grpc_url]) == 1
    assert "Stub process 'grok1_0_0' is not healthy" in capsys.readouterr().err
    # Triton itself sees nothing, which is why there is a probe.
    with urllib.request.urlopen(f"{own.options.http_url}/v2/health/ready", timeout=10) as answer:
        assert answer.status == 200
    own.stop()
    assert leftovers(own.shared_memory_prefix) == []


@pytest.mark.server
def test_a_drain_that_breaks_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_url: str, _seconds: float) -> None:
        raise RuntimeError("no drain")

    monkeypatch.setattr("grok1_backend.server.drain.drain", broken)
    options = local_options(tmp_path, ECHO, exit_timeout=1)
    server = TritonServer(options, start_timeout=60)
    with pytest.raises(RuntimeError, match="no drain"), server:
        pid = server.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not list(Path("/dev/shm").glob(f"{server.shared_memory_prefix}*"))


def test_an_engine_that_does_not_answer_is_left_as_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        drain(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)


def test_a_server_that_is_not_there_is_no_error() -> None:
    (port,) = free_ports(1)
    drain(f"127.0.0.1:{port}", 0.1)
