"""Calls of `grok1` from within the server, for the models that show it without sequences.

Each call is a sequence of one turn (START and END) under a correlation id of its own.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.interface import (
    ABORT,
    ERROR,
    FINISH_REASON,
    GROK1,
    INPUT_IDS,
    INTERNAL,
    Tensors,
)
from grok1_backend.triton.values import from_tensor

_ONE_TURN = (
    pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
)
_INPUTS = frozenset(tensor.name for tensor in GROK1.inputs)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One generation."""

    prompt_ids: list[int]
    settings: Tensors = field(default_factory=dict)
    """The client's tensors; those that `grok1` does not know stay here."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    request_id: str
    timeout: int = 0
    """Microseconds; 0: none."""
    wanted: tuple[str, ...]
    """Names of the outputs to send, `finish_reason` among them."""


class Caller:
    """Makes the calls of one model."""

    KEPT_SECONDS = 5.0
    """A call's iterator may not go at its end: the stub forgets it a moment later, on a thread
    that does not hold Python's lock, and would free its arrays there if no one else had it."""
    _FORGOTTEN_SECONDS = 0.5

    def __init__(self) -> None:
        self._ended: deque[tuple[float, object]] = deque()
        self._lock = threading.Lock()

    def replies(self, call: Call) -> Iterator[Tensors]:
        """The responses as they come; blocks between them. To be read to its end.

        Raises:
          EngineError: what `grok1` answered with.
        """
        tensors = {name: array for name, array in call.settings.items() if name in _INPUTS}
        tensors[INPUT_IDS.name] = INPUT_IDS.tensor(call.prompt_ids)
        finished = False
        for reply in self._execute(
            tensors, call.wanted, call.request_id, call.parameters, call.timeout
        ):
            finished = reply[FINISH_REASON.name].item() != b""
            yield reply
        if not finished:
            raise EngineError(ErrorCode.INTERNAL, "grok1 ended without an answer")

    def abort(self, call: Call) -> None:
        """Cancels the generation, if it runs."""
        tensors: Tensors = {ABORT.name: ABORT.tensor(call.request_id)}
        for _ in self._execute(tensors, (FINISH_REASON.name,)):
            pass

    def close(self) -> None:
        """Lets go of what is kept, while Python still runs."""
        time.sleep(self._FORGOTTEN_SECONDS)
        self._ended.clear()

    def _execute(
        self,
        tensors: Tensors,
        wanted: tuple[str, ...],
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        timeout: int = 0,
    ) -> Iterator[Tensors]:
        tensors = tensors | {INTERNAL.name: INTERNAL.tensor(True)}
        request = pb_utils.InferenceRequest(
            model_name=GROK1.name,
            request_id=request_id,
            correlation_id=uuid.uuid4().hex,
            flags=_ONE_TURN,
            inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
            requested_output_names=[*wanted, ERROR.name],
            parameters=dict(parameters or {}),
            timeout=timeout,
        )
        responses = request.exec(decoupled=True)
        try:
            for response in responses:
                if response.has_error():  # of Triton; `grok1` sends its own as an output
                    raise EngineError(ErrorCode.INTERNAL, response.error().message())
                outputs = {
                    tensor.name(): np.array(tensor.as_numpy())
                    for tensor in response.output_tensors()
                }
                if ERROR.name in outputs:
                    code, message = from_tensor(ERROR, outputs[ERROR.name])
                    raise EngineError(ErrorCode(code), message)
                if outputs:
                    yield outputs
        finally:
            self._keep(responses)

    def _keep(self, responses: object) -> None:
        now = time.monotonic()
        with self._lock:
            self._ended.append((now, responses))
            while self._ended[0][0] < now - self.KEPT_SECONDS:
                self._ended.popleft()
