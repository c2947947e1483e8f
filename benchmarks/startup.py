"""What a server costs from its start to READY: seconds, and CPU seconds of all its processes.

Cold is a start with an empty cache of compiled executables; warm are the starts after it. The
native library is built before: it belongs to the installation.

    python benchmarks/startup.py [--model DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
import unittest.mock
from pathlib import Path

from processes import group_cpu, own_cpu
from results import ROOT, Row

from grok1_backend.kernels.build import BuildError, find_or_build
from grok1_backend.server import ServerOptions, TritonServer
from grok1_backend.server.options import free_ports

LAUNCHER = "launcher"


@dataclasses.dataclass(frozen=True)
class Start:
    """What one start took, in seconds."""

    wall: float
    cpu: dict[str, float]
    """User and system time by process: launcher, tritonserver with what it started and ended
    again, and each model's stub."""

    @property
    def total_cpu(self) -> float:
        return sum(self.cpu.values())


def start(model: Path, cache: Path) -> Start:
    """Starts a server, measures it when it is ready, and stops it."""
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        model_repositories=(ROOT / "model_repository",),
        model=model,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        cache_dir=cache,
        log_file=cache / "tritonserver.log",
    )
    before = own_cpu()
    began = time.monotonic()
    with TritonServer(options) as server:
        wall = time.monotonic() - began
        return Start(wall, {LAUNCHER: own_cpu() - before} | group_cpu(server.pid))


def measure(model: Path, rounds: int) -> list[Row]:
    """One cold start and `rounds` warm ones."""
    with contextlib.suppress(BuildError):
        find_or_build()
    with (
        tempfile.TemporaryDirectory() as folder,
        # It would go before the folder if the caller had set it.
        unittest.mock.patch.dict(os.environ, JAX_COMPILATION_CACHE_DIR=f"{folder}/jax"),
    ):
        cold, *warm = [start(model, Path(folder)) for _ in range(1 + rounds)]
    samples = {
        "start-up, cold": [cold.wall],
        "start-up, cold, CPU": [cold.total_cpu],
        "start-up, warm": [run.wall for run in warm],
        "start-up, warm, CPU": [run.total_cpu for run in warm],
    }
    for process in warm[0].cpu:
        samples[f"start-up, warm, CPU of {process}"] = [run.cpu[process] for run in warm]
    return [Row(name=name, unit="s", ours=seconds) for name, seconds in samples.items()]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "embedded_model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for row in measure(arguments.model, arguments.rounds):
        print(f"{row.name:48s} {statistics.median(row.ours):8.2f} {row.unit}")


if __name__ == "__main__":
    main()
