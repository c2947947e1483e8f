"""`grok1-backend convert`: a checkpoint into the fast format, with lines of progress."""

from __future__ import annotations

import argparse
from pathlib import Path

from grok1_backend.checkpoint.convert import FILE_BYTES, convert
from grok1_backend.checkpoint.progress import ProgressLog
from grok1_backend.errors import UserError
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
        "--config",
        help="config file, model directory or published name, such as grok1-314b "
        "(default: the config.toml in the source)",
    )
    parser.add_argument(
        "--file-gib",
        type=float,
        default=FILE_BYTES / 2**30,
        help="size of the largest file in GiB (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Converts.

    Raises:
      UserError: there is no such config, or it is wrong; the source cannot be read; the target
        holds something else or cannot be written.
    """
    try:
        config = load_config(arguments.config or arguments.source)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    convert(
        arguments.source,
        arguments.target,
        config,
        ProgressLog("converting", print),
        file_bytes=int(arguments.file_gib * 2**30),
    )
