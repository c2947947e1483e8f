"""Time to the first token over HTTP: tritonserver with our models, and llama.cpp's server.

Both are asked for a stream by a client that knows nothing but HTTP; the clock runs from before
the connection to the first event. The prompt is token ids, so that neither tokenizer matters.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_model import CONFIG
from contenders import LLAMA_CPP, Contenders
from peers.worker import prompts
from results import ROOT, Row

from grok1_backend.server import ServerOptions, TritonServer
from grok1_backend.server.options import free_ports

PROMPTS = (64, 512)
TOKENS = 4
START_SECONDS = 600.0
OURS = "ours"
Ask = Callable[[list[int]], float]
"""Sends a prompt and returns the seconds until its first token."""


def stream(port: int, path: str, body: dict[str, Any]) -> float:
    """Seconds until the first event of a stream; reads it to its end."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}: {response.read(500)!r}")
        line = response.readline()
        while not line.startswith(b"data:"):
            if not line:
                raise RuntimeError(f"{path}: the stream ended without an event")
            line = response.readline()
        seconds = time.perf_counter() - began
        response.read()
        return seconds
    finally:
        connection.close()


@contextlib.contextmanager
def ours(model: Path, folder: Path) -> Iterator[tuple[int, Ask]]:
    """A tritonserver with the benchmark's model: its process group, and how to ask it."""
    ports = free_ports(3)
    options = ServerOptions(
        model_repositories=(ROOT / "model_repository",),
        model=model,
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
        cache_dir=folder,
        log_file=folder / "tritonserver.log",
    )

    def ask(prompt: list[int]) -> float:
        body = {"input_ids": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return stream(ports[0], "/v2/models/grok1_generate/generate_stream", body)

    with TritonServer(options, start_timeout=START_SECONDS) as server:
        try:
            yield server.pid, ask
        finally:
            os.killpg(server.pid, signal.SIGCONT)


@contextlib.contextmanager
def llama_server(model: Path, peers: Path, log: Path) -> Iterator[tuple[int, Ask]]:
    """llama.cpp's server: its process group, and how to ask it."""
    (port,) = free_ports(1)
    command = [peers / "llama.cpp" / "build" / "bin" / "llama-server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", port, "--threads", len(os.sched_getaffinity(0))]
    command += ["--parallel", 8, "--ctx-size", 8 * 1024, "--cache-ram", 0]

    def ask(prompt: list[int]) -> float:
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "stream": True}
        return stream(port, "/completion", body | {"cache_prompt": False, "ignore_eos": True})

    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        _wait_until_healthy(port, process)
        yield process.pid, ask
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("llama-server did not become ready")


def measure(contenders: Contenders, rounds: int) -> list[Row]:
    """Rows for each length of `PROMPTS`; a peer that fails is left out."""
    with contextlib.ExitStack() as stack:
        model = contenders.model("int8")
        servers = {OURS: stack.enter_context(ours(model, contenders.folder))}
        os.killpg(servers[OURS][0], signal.SIGSTOP)
        for name, kind in LLAMA_CPP.items():
            if contenders.peers is None:
                continue
            server = f"{name} server"
            log = contenders.folder / f"{server.replace(' ', '-')}.log"
            try:
                running = llama_server(contenders.gguf(kind), contenders.peers, log)
                servers[server] = stack.enter_context(running)
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                contenders.missing[server] = str(error)
                continue
            os.killpg(servers[server][0], signal.SIGSTOP)
        return [_row(length, servers, contenders.missing, rounds) for length in PROMPTS]


def _row(
    length: int, servers: dict[str, tuple[int, Ask]], missing: dict[str, str], rounds: int
) -> Row:
    """The servers take turns; the others are stopped meanwhile. The first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        (prompt,) = prompts(number, 1, length, CONFIG.vocab_size)
        for name in list(samples):
            group, ask = servers[name]
            os.killpg(group, signal.SIGCONT)
            try:
                seconds = ask(prompt)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                if name == OURS:
                    raise
                missing[name] = str(error)
                del samples[name]
                continue
            os.killpg(group, signal.SIGSTOP)
            if number:
                samples[name].append(seconds)
    return Row(
        name=f"time to first token, {length} tokens, through the server",
        unit="s",
        ours=samples.pop(OURS),
        peers=samples,
        details={"prompt": length},
    )
