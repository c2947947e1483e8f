"""Options of the servers that tests start."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from grok1_backend.server import ServerOptions, TritonServer
from grok1_backend.server.options import free_ports

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED_MODEL = ROOT / "embedded_model"
MODEL_REPOSITORY = ROOT / "model_repository"


def local_options(folder: Path, *repositories: Path, **changes: Any) -> ServerOptions:
    """Options of a server on free ports with the embedded model.

    Args:
      folder: gets the log.
      repositories: of models; the project's own if there are none.
      changes: of any option.
    """
    http_port, grpc_port, metrics_port = free_ports(3)
    options: dict[str, Any] = {
        "model": EMBEDDED_MODEL,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "cache_dir": ROOT / ".cache",
        "log_file": folder / "tritonserver.log",
    }
    return ServerOptions(
        model_repositories=repositories or (MODEL_REPOSITORY,), **(options | changes)
    )


def process_of(server: TritonServer, model: str) -> int:
    """The process id of a model's Python."""
    lines = dict.fromkeys(Path("/proc").glob("[0-9]*/cmdline"), b"")
    for path in lines:
        with contextlib.suppress(OSError):  # ended meanwhile
            lines[path] = path.read_bytes()
    marks = (server.shared_memory_prefix.encode(), f"/{model}/1/model.py".encode())
    (found,) = [int(p.parent.name) for p, line in lines.items() if all(m in line for m in marks)]
    return found
