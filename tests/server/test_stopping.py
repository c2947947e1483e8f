"""What a stop does to running requests, and that a dead engine does not hinder it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from generation import Stream
from tritonclient.utils import InferenceServerException

from grok1_backend.cli import main
from grok1_backend.server import ServerOptions, TritonServer
from grok1_backend.server.drain import drain
from grok1_backend.server.options import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = {"text_input": "And", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[TritonServer]:
    """A server that a test may stop, with the embedded model."""
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        model_repositories=(ROOT / "model_repository",),
        model=ROOT / "embedded_model",
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        exit_timeout=1,
        cache_dir=ROOT / ".cache",
        log_file=tmp_path / "tritonserver.log",
    )
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
    os.kill(_process_of(own, "grok1"), signal.SIGKILL)
    assert main(["health", "--url", own.options.grpc_url]) == 1
    assert "Stub process 'grok1_0_0' is not healthy" in capsys.readouterr().err
    # Triton itself sees nothing, which is why there is a probe.
    with urllib.request.urlopen(f"{own.options.http_url}/v2/health/ready", timeout=10) as answer:
        assert answer.status == 200
    own.stop()
    assert leftovers(own.shared_memory_prefix) == []


def _process_of(server: TritonServer, model: str) -> int:
    """The process id of a model's Python."""
    group = subprocess.run(["pgrep", "-g", str(server.pid)], capture_output=True, check=True)
    pids = [int(pid) for pid in group.stdout.split()]
    of_model = f"/{model}/1/model.py".encode()
    (found,) = [pid for pid in pids if of_model in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def test_an_engine_that_does_not_answer_is_left_as_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        drain(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)


def test_a_server_that_is_not_there_is_no_error() -> None:
    (port,) = free_ports(1)
    drain(f"127.0.0.1:{port}", 0.1)
