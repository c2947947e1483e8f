"""What a local server is started with, and the checks made before anything is started."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from grok1_backend.errors import UserError

LOG_LEVELS = ("error", "warning", "info", "verbose")
MODEL_CONTROL_MODES = ("explicit", "none")


class LaunchError(UserError):
    """The server cannot be started, or did not start; the message is one sentence for the user."""


@dataclass(frozen=True)
class ServerOptions:
    """One local server.

    Raises:
      LaunchError: a value that no server could be started with; ports in use and a missing
        repository are found by `check`, as they can change until the start.
    """

    model_repositories: tuple[Path, ...]  # loaded together; no model's name may occur twice
    model: Path = Path("embedded_model")  # directory of config.toml, tokenizer.model and ckpt-0/
    slots: int | None = None  # rows of the decode batch; None: as the model's config says
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    model_control: str = "explicit"  # "explicit" lets clients load and unload models
    log_level: str = "info"
    exit_timeout: int = 5  # seconds that running requests get when the server is stopped
    cache_dir: Path | None = None  # compiled executables; None: the user's cache
    log_file: Path | None = None  # the server's log; None: in the cache

    def __post_init__(self) -> None:
        for name, port in self.ports.items():
            if not 1 <= port <= 65535:
                raise LaunchError(f"the {name} port is {port}: a port is between 1 and 65535")
        if len(set(self.ports.values())) < len(self.ports):
            listed = ", ".join(f"{name} {port}" for name, port in self.ports.items())
            raise LaunchError(f"the ports must differ from each other: {listed}")
        if self.slots is not None and self.slots < 1:
            raise LaunchError(f"slots is {self.slots}: at least 1 is needed")
        if self.exit_timeout < 0:
            raise LaunchError(f"the exit timeout is {self.exit_timeout} s: 0 or more is needed")
        for name, value, known in (
            ("log level", self.log_level, LOG_LEVELS),
            ("model control mode", self.model_control, MODEL_CONTROL_MODES),
        ):
            if value not in known:
                raise LaunchError(f"the {name} is {value!r}: one of {', '.join(known)}")

    @property
    def ports(self) -> dict[str, int]:
        """Name to number of the three ports."""
        return {"HTTP": self.http_port, "gRPC": self.grpc_port, "metrics": self.metrics_port}

    @property
    def http_url(self) -> str:
        """Where the HTTP interface is, as `http://host:port`."""
        return f"http://{self.address}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Where the gRPC interface is, as tritonclient wants it: `host:port`."""
        return f"{self.address}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus finds the metrics."""
        return f"http://{self.address}:{self.metrics_port}/metrics"

    @property
    def cache(self) -> Path:
        """The folder that is kept from one start to the next."""
        if self.cache_dir is not None:
            return self.cache_dir.absolute()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "grok1-backend"

    @property
    def log(self) -> Path:
        """The server's log, written anew by each start; in the cache it is named by the port."""
        if self.log_file is not None:
            return self.log_file.absolute()
        return self.cache / f"tritonserver-{self.http_port}.log"

    def check(self) -> None:
        """Raises LaunchError for a missing repository or model and for a port in use."""
        for path in self.model_repositories:
            if not path.is_dir():
                raise LaunchError(f"there is no model repository at {path}")
        if not (self.model / "config.toml").is_file():
            raise LaunchError(
                f"{self.model} is no model directory: it has no config.toml"
                if self.model.is_dir()
                else f"there is no model directory at {self.model}"
            )
        for name, port in self.ports.items():
            if not port_is_free(self.address, port):
                raise LaunchError(
                    f"the {name} port {port} on {self.address} is in use: "
                    "stop what listens there, or choose another port"
                )


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without this, a port whose last connection closed a minute ago would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports on the loopback interface that nothing listens on at the moment."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
