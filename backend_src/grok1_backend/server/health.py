"""The `health` command: a probe that asks a server for one token, as its clients do.

Triton's own readiness does not see that a model's process has died or that its device hangs. What
the engine itself answers shows that it works, also when it has no room: a server under load must
not be restarted for that.
"""

from __future__ import annotations

import argparse

from grok1_backend.errors import UserError

MODEL = "grok1_complete"
_TOP_PRIORITY = 2**31 - 1
_MAX_SECONDS = 3600
# Refusals of a server that works. The first two come at once when too many wait. The last is the
# engine's, between two steps: others' requests had all slots until the deadline.
_BUSY = ("the queue is full", "prompts are at work, the limit", "deadline has passed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `health`."""
    parser.add_argument(
        "--url",
        default="localhost:8001",
        metavar="HOST:PORT",
        help="the server's gRPC interface (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="a server without an answer by then is not healthy (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Says that the server is healthy, or busy.

    Raises:
      UserError: it is not; the message says why.
    """
    print(probe(arguments.url, arguments.timeout))


def probe(url: str, seconds: float) -> str:
    """Asks for one token.

    Args:
      url: `host:port` of the gRPC interface.
      seconds: that the whole takes at most; the engine gets half of them.

    Returns:
      How the server is, in words.

    Raises:
      UserError: it gave no answer in time, or one that shows that it cannot serve.
    """
    if not 0 < seconds <= _MAX_SECONDS:
        raise UserError(f"the timeout is {seconds:g} s: more than 0, at most {_MAX_SECONDS}")
    try:
        import numpy as np
        from tritonclient import grpc
        from tritonclient.utils import InferenceServerException
    except ImportError as error:
        raise UserError(f"a probe needs tritonclient[grpc]: {error}") from None

    def one(name: str, kind: str, value: np.generic | bytes) -> grpc.InferInput:
        made = grpc.InferInput(name, [1, 1], kind)
        made.set_data_from_numpy(np.array([[value]], np.object_ if kind == "BYTES" else None))
        return made

    inputs = [
        one("text_input", "BYTES", b"Health"),
        one("max_tokens", "INT32", np.int32(1)),
        one("priority", "INT32", np.int32(_TOP_PRIORITY)),
    ]
    microseconds = max(1, int(seconds / 2 * 1e6))
    try:
        with grpc.InferenceServerClient(url) as client:
            client.infer(MODEL, inputs, timeout=microseconds, client_timeout=seconds)
    except InferenceServerException as error:
        message = str(error.message())
        if any(words in message for words in _BUSY):
            return f"healthy, but busy: {message}"
        if error.status() == "StatusCode.DEADLINE_EXCEEDED":
            message = f"no answer within {seconds:g} s"
        raise UserError(f"the server at {url} is not healthy: {message}") from None
    return "healthy"
