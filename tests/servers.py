"""Options of the servers that tests start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grok1_backend.server import ServerOptions
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
