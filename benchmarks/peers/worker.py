"""The process of one engine under measurement: loads once, measures on command, waits otherwise.

Commands come as lines of JSON on standard input, and each is answered by one on standard output.
Only the standard library is used: each engine runs this with a Python of its own.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

Handlers = dict[str, Callable[..., dict[str, Any]]]


def reserve_output() -> Callable[[dict[str, Any]], None]:
    """Takes standard output for the answers; what libraries print goes to standard error.

    To be called before the engine is imported. Returns the function that sends one answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return send


def serve(
    send: Callable[[dict[str, Any]], None], handlers: Handlers, versions: dict[str, str]
) -> None:
    """Says that the engine is loaded, and answers commands until the input ends."""
    send({"ready": versions})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            send({"result": handlers[command.pop("call")](**command)})
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})


def prompts(seed: int, requests: int, length: int, vocab_size: int) -> list[list[int]]:
    """The same distinct random prompts for every engine; no special ids or bytes among them.

    Prompts of another length or number share no beginning with these, which an engine might know.
    """
    numbers = random.Random(f"{seed} {requests} {length}")
    return [[numbers.randrange(300, vocab_size) for _ in range(length)] for _ in range(requests)]


def decode_window(times: list[list[float]]) -> dict[str, Any]:
    """The rate while all requests decode: from the last first token to the first last token.

    Args:
      times: when each token of each request came.
    """
    start = max(tokens[0] for tokens in times)
    end = min(tokens[-1] for tokens in times)
    count = sum(start < time <= end for tokens in times for time in tokens)
    return {"tokens": count, "seconds": end - start}
