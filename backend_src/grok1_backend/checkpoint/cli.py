"""`grok1-backend convert`: a checkpoint into the fast format, with a line of progress."""

from __future__ import annotations

import argparse
from pathlib import Path

from grok1_backend.checkpoint.convert import FILE_BYTES, convert
from grok1_backend.checkpoint.progress import ProgressLog
from grok1_backend.model.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `convert`."""
    parser.add_argument("source", type=Path, help="directory of the checkpoint to read")
    parser.add_argument(
        "target",
        type=Path,
        help="directory to write: new, empty, or left by an interrupted run, which is taken up",
    )
    parser.add_argument(
        "--config", required=True, help="config file, model directory, or name (grok1-314b)"
    )
    parser.add_argument(
        "--file-gib",
        type=float,
        default=FILE_BYTES / 2**30,
        help="largest file in GiB (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Converts.

    Raises:
      CheckpointError, ValueError, FileNotFoundError: what the user can put right.
    """
    convert(
        arguments.source,
        arguments.target,
        load_config(arguments.config),
        ProgressLog("converting", print),
        file_bytes=int(arguments.file_gib * 2**30),
    )
