"""Gateways that tests start, as their users do, and how they are asked."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from generation import SECONDS, HttpAnswer, eventually, metric

from grok1_backend.server.options import free_ports
from servers import EMBEDDED_MODEL

NAME = EMBEDDED_MODEL.name


@dataclass(frozen=True)
class Gateway:
    """One that runs."""

    url: str
    process: subprocess.Popen[str]

    def get(self, path: str) -> HttpAnswer:
        return send(urllib.request.Request(f"{self.url}{path}"))

    def post(self, path: str, body: Any) -> HttpAnswer:
        """Sends a body as JSON; a text as it is."""
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        return send(urllib.request.Request(f"{self.url}{path}", text.encode(), headers))

    def complete(self, **fields: Any) -> HttpAnswer:
        return self.post("/v1/completions", {"model": NAME} | fields)


def send(request: urllib.request.Request) -> HttpAnswer:
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return HttpAnswer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return HttpAnswer(error.code, error.read().decode())


@contextlib.contextmanager
def launch(grpc_url: str, *options: str) -> Iterator[Gateway]:
    """A gateway on a free port, until the block ends: it must stop in order then."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "grok1_backend.cli", "openai", "--url", grpc_url]
    command += ["--port", str(port), "--model", str(EMBEDDED_MODEL), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:
        gateway = Gateway(f"http://127.0.0.1:{port}", process)
        try:
            wait_until_it_listens(gateway)
            yield gateway
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output
            assert "Traceback" not in output, output
            assert "rror" not in output, output
        finally:
            process.kill()


def wait_until_it_listens(gateway: Gateway) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            gateway.get("/v1/models")
            return
        except urllib.error.URLError:
            assert gateway.process.poll() is None, gateway.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)


def is_free(metrics_url: str) -> bool:
    """Whether no request holds anything, asked with the second that it may take."""
    names = ("grok1_requests_running", "grok1_requests_waiting", "grok1_kv_pages_used")
    return eventually(lambda: all(metric(metrics_url, name) == 0 for name in names), 1.5)


def running(metrics_url: str, count: int) -> bool:
    return eventually(lambda: metric(metrics_url, "grok1_requests_running") >= count, 20)
