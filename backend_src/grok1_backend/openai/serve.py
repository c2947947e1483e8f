"""The `openai` command: the gateway in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from types import FrameType

from grok1_backend.errors import UserError
from grok1_backend.server.options import ServerOptions, port_is_free
from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer

_DEFAULTS = ServerOptions(model_repositories=())
_PORT = 9000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `openai`."""
    parser.add_argument(
        "--url",
        default=_DEFAULTS.grpc_url,
        metavar="HOST:PORT",
        help="the server's gRPC interface (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=_DEFAULTS.model,
        metavar="DIR",
        help=f"the model that the server has; only its {TOKENIZER_FILE} is read "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="what clients call it (default: the name of its directory)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja2 template that makes the prompts of /v1/chat/completions (default: no chats)",
    )
    parser.add_argument(
        "--address",
        default=_DEFAULTS.address,
        help="address to listen on; 0.0.0.0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, metavar="PORT", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--exit-timeout",
        type=int,
        default=_DEFAULTS.exit_timeout,
        metavar="SECONDS",
        help="what running requests get when the gateway is stopped (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
      UserError: the extra is not installed, there is no tokenizer, the port is taken.
    """
    try:
        from grok1_backend.openai.chat import read_template
        from grok1_backend.openai.http_server import GatewayOptions, serve
    except ImportError as error:
        raise UserError(f"pip install 'grok1-backend[openai]' is needed: {error}") from None

    tokenizer = arguments.model / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise UserError(f"there is no {tokenizer}: name the model's directory by --model")
    if not port_is_free(arguments.address, arguments.port):
        raise UserError(f"the port {arguments.port} on {arguments.address} is in use")
    options = GatewayOptions(
        url=arguments.url,
        tokenizer=Tokenizer(tokenizer),
        model_name=arguments.model_name or arguments.model.resolve().name,
        render=read_template(arguments.chat_template) if arguments.chat_template else None,
        address=arguments.address,
        port=arguments.port,
        exit_timeout=arguments.exit_timeout,
    )
    # uvicorn raises the signal that stopped it again, when it has stopped.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    print(
        f"Serving {options.model_name} on http://{options.address}:{options.port}/v1. "
        "Ctrl-C stops the gateway.",
        flush=True,
    )
    try:
        asyncio.run(serve(options))
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
