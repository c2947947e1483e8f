"""The command line `grok1-backend`: one row of a table for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grok1_backend.errors import UserError


@dataclass(frozen=True)
class Command:
    """A subcommand; `module` has `add_arguments(parser)` and `run(arguments)`.

    The module is imported only when its subcommand is used, so that none pays for another's
    imports. For what the user can put right, `run` raises a `UserError`.
    """

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("serve", "grok1_backend.server.serve", "start a local tritonserver and ask it once"),
    Command("health", "grok1_backend.server.health", "ask a running server for one token"),
    Command("openai", "grok1_backend.openai.serve", "serve OpenAI's API in front of a server"),
    Command("plan", "grok1_backend.plan", "show what fits in the memory of the devices"),
    Command(
        "convert",
        "grok1_backend.checkpoint.cli",
        "write a checkpoint as safetensors, with checksums",
    ),
    Command("score", "grok1_backend.score", "show how likely a model finds given tokens"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code: 0, or 1 after one sentence on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="grok1-backend",
        description="Grok-1-architecture language models on NVIDIA Triton Inference Server.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary.capitalize() + "."
        )
        if argv[:1] == [command.name]:
            importlib.import_module(command.module).add_arguments(subparser)
    arguments = parser.parse_args(argv)
    try:
        module = next(item.module for item in COMMANDS if item.name == arguments.command)
        importlib.import_module(module).run(arguments)
    except UserError as error:
        print(f"grok1-backend: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
