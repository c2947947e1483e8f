"""The real server that the tests of a session share, and what they reach it by."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grok1_backend.server import TritonServer
from servers import MODEL_REPOSITORY, ROOT, local_options


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start a server: `-m 'not server'` leaves them out."""
    for item in items:
        if {"server", "own_server", "launch"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("server")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The project's models on the embedded weights, and an example's; one server for all tests."""
    example = ROOT / "client_examples" / "custom_ensemble" / "model_repository"
    options = local_options(tmp_path_factory.mktemp("server"), MODEL_REPOSITORY, example)
    with TritonServer(options, start_timeout=900) as running:
        yield running


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server for one module, whose tests unload models."""
    options = local_options(tmp_path_factory.mktemp("own_server"))
    with TritonServer(options, start_timeout=900) as running:
        yield running


@pytest.fixture(scope="session")
def grpc_url(server: TritonServer) -> str:
    """The server's gRPC interface, as tritonclient wants it: `host:port`."""
    return server.options.grpc_url


@pytest.fixture(scope="session")
def http_url(server: TritonServer) -> str:
    """The server's HTTP interface: `http://host:port`."""
    return server.options.http_url


@pytest.fixture(scope="session")
def metrics_url(server: TritonServer) -> str:
    """The page of the server's Prometheus metrics."""
    return server.options.metrics_url


@pytest.fixture(scope="session")
def perf_analyzer() -> str:
    """The command of Triton's load generator."""
    command = Path(sys.prefix) / "bin" / "perf_analyzer"
    if not command.exists():
        pytest.fail(f"no {command}: run tests/tools/install_perf_analyzer.py, or `make test`")
    return str(command)
