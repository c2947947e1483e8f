"""The `serve` command: a local server in the foreground, from its start to a Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from types import FrameType

from grok1_backend.server import first_answer
from grok1_backend.server.options import (
    LOG_LEVELS,
    MODEL_CONTROL_MODES,
    ServerOptions,
)
from grok1_backend.server.process import TritonServer

_REPOSITORY = Path("model_repository")
_DEFAULTS = ServerOptions(model_repositories=(_REPOSITORY,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `serve`."""
    parser.add_argument(
        "--model",
        type=Path,
        default=_DEFAULTS.model,
        metavar="DIR",
        help="the model: config.toml, tokenizer.model and ckpt-0/ (default: %(default)s)",
    )
    parser.add_argument(
        "--slots",
        type=int,
        help="requests that decode at the same time (default: as the model's config says)",
    )
    parser.add_argument(
        "--model-repository",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"what Triton loads; may be given several times (default: {_REPOSITORY})",
    )
    parser.add_argument(
        "--address",
        default=_DEFAULTS.address,
        help="address to listen on; 0.0.0.0 for all (default: %(default)s)",
    )
    for name in ("http", "grpc", "metrics"):
        parser.add_argument(
            f"--{name}-port",
            type=int,
            default=getattr(_DEFAULTS, f"{name}_port"),
            metavar="PORT",
            help="(default: %(default)s)",
        )
    parser.add_argument(
        "--model-control",
        choices=MODEL_CONTROL_MODES,
        default=_DEFAULTS.model_control,
        help="explicit lets clients load and unload models (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=_DEFAULTS.log_level,
        help="of the server's log file (default: %(default)s; progress needs info)",
    )
    parser.add_argument(
        "--exit-timeout",
        type=int,
        default=_DEFAULTS.exit_timeout,
        metavar="SECONDS",
        help="what running requests get when the server is stopped (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="keeps compiled executables (default: grok1-backend in the user's cache)",
    )
    parser.add_argument(
        "--log-file",
        type=Path,
        metavar="FILE",
        help="the server's log, written anew (default: tritonserver-PORT.log in the cache)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
      LaunchError: the server could not be started, did not answer, or ended by itself.
    """
    options = ServerOptions(
        model_repositories=tuple(arguments.model_repository or _DEFAULTS.model_repositories),
        model=arguments.model,
        slots=arguments.slots,
        address=arguments.address,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        model_control=arguments.model_control,
        log_level=arguments.log_level,
        exit_timeout=arguments.exit_timeout,
        cache_dir=arguments.cache_dir,
        log_file=arguments.log_file,
    )
    # An orderly stop on either, also in a background job, where SIGINT is ignored at first.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)

    try:
        report(f"starting tritonserver with {options.model}; log: {options.log}")
        with TritonServer(options, report=report) as server:
            report("ready")
            _show_first_answer(options)
            print(
                f"Serving HTTP on {options.http_url}, gRPC on {options.grpc_url}, "
                f"metrics on {options.metrics_url}. Ctrl-C stops the server.",
                flush=True,
            )
            try:
                server.wait()
            finally:
                print("\nstopping", flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _show_first_answer(options: ServerOptions) -> None:
    print(f"\n{first_answer.PROMPT}", end="", flush=True)
    for piece in first_answer.stream(options.grpc_url):
        print(piece, end="", flush=True)
    print(f"\n\n{first_answer.how_to_ask(options)}", flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
