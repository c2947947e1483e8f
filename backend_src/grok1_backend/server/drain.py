"""Ends what runs on a server in order, before the server is stopped."""

from __future__ import annotations

import queue
import uuid

import numpy as np
from tritonclient import grpc

_MODEL = "grok1"
_ANSWER_SECONDS = 2  # a step may have to end first; an engine that hangs never answers


def drain(grpc_url: str, grace_seconds: float) -> None:
    """Lets the engine take nothing more in, and waits until it is empty.

    Streams that still run after the grace end with an error that says why. Does its best: a
    server without the engine, or whose engine is dead, or does not answer in time, is left as it
    is.

    Args:
      grpc_url: `host:port` of the server.
      grace_seconds: what running requests get.
    """
    grace = grpc.InferInput("drain", [1, 1], "FP32")
    grace.set_data_from_numpy(np.array([[grace_seconds]], np.float32))
    answered: queue.SimpleQueue[object] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(grpc_url)
    try:
        client.start_stream(lambda result, error: answered.put(error or result))
        client.async_stream_infer(
            _MODEL,
            [grace],
            sequence_id=uuid.uuid4().hex,
            sequence_start=True,
            sequence_end=True,
        )
        answered.get(timeout=grace_seconds + _ANSWER_SECONDS)
    except (queue.Empty, grpc.InferenceServerException):
        pass
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()
