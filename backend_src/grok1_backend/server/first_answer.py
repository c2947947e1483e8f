"""Asks a running server for one streamed answer, as a user would, and says how to ask again."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Iterator

import numpy as np
from tritonclient import grpc

from grok1_backend.server.options import LaunchError, ServerOptions

MODEL = "grok1_generate"
PROMPT = "In the beginning"
MAX_TOKENS = 48
_SECONDS = 300


def stream(grpc_url: str) -> Iterator[str]:
    """Yields the pieces of the answer to `PROMPT` as they come.

    Raises:
      LaunchError: the server refused the request or did not answer.
    """
    text = grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=np.object_))
    limit = grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[MAX_TOKENS]], dtype=np.int32))
    answers: queue.Queue[tuple[grpc.InferResult | None, Exception | None]] = queue.Queue()
    with grpc.InferenceServerClient(grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, [text, limit], enable_empty_final_response=True)
        while True:
            try:
                result, error = answers.get(timeout=_SECONDS)
            except queue.Empty:
                raise LaunchError(f"{MODEL} did not answer within {_SECONDS} s") from None
            if error is not None or result is None:
                raise LaunchError(f"{MODEL} refused the first prompt: {error}")
            piece = result.as_numpy("text_output")
            if piece is not None:
                yield piece.reshape(-1)[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def how_to_ask(options: ServerOptions) -> str:
    """Commands to paste: curl, and Python with tritonclient."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": MAX_TOKENS})
    return f"""\
Ask by HTTP, streamed:

  curl -N {options.http_url}/v2/models/{MODEL}/generate_stream -d '{body}'

Ask by gRPC, streamed, from Python:

{sys.executable} - <<'EOF'
import numpy as np
from tritonclient import grpc

def show(result, error):
    piece = None if error else result.as_numpy("text_output")
    print(error if error else "" if piece is None else piece.item().decode(), end="", flush=True)

prompt = grpc.InferInput("text_input", [1, 1], "BYTES")
prompt.set_data_from_numpy(np.array([[b"{PROMPT}"]], dtype=object))
limit = grpc.InferInput("max_tokens", [1, 1], "INT32")
limit.set_data_from_numpy(np.array([[{MAX_TOKENS}]], dtype=np.int32))
with grpc.InferenceServerClient("{options.grpc_url}") as client:
    client.start_stream(show)
    client.async_stream_infer("{MODEL}", [prompt, limit])
    client.stop_stream()
EOF
"""
