"""Triton's request objects turned into plain values that outlive `execute`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from grok1_backend.triton.interface import Tensors
from grok1_backend.triton.parsing import ClientRequest


def client_requests(request: Any) -> list[ClientRequest]:
    """The prompts of a request, one for each row of its batch, in order.

    Arrays are copied: the server frees a request's memory when `execute` returns.
    """
    tensors: Tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
    flags = request.flags()
    batch = max((len(array) for array in tensors.values()), default=0)
    request_id = request.request_id()
    return [
        ClientRequest(
            tensors={name: array[row : row + 1] for name, array in tensors.items()},
            parameters=json.loads(request.parameters() or "{}"),
            request_id=f"{request_id}-{row}" if request_id and batch > 1 else request_id,
            correlation_id=request.correlation_id(),
            start=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            end=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            timeout=request.timeout(),
        )
        for row in range(batch)
    ]
