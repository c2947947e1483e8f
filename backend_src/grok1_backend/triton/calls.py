"""Calls of `grok1` from within the server, for the models that show it without sequences.

Each call is a sequence of one turn (START and END) under a correlation id of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from grok1_backend.triton.interface import ABORT, ACKNOWLEDGE, GROK1, INPUT_IDS, Tensors
from grok1_backend.triton.responses import from_triton

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
    """Names of the outputs to send."""

    def replies(self) -> Iterator[Tensors]:
        """The responses as they come; blocks between them. To be read to its end.

        Raises:
          EngineError: what `grok1` answered with.
        """
        tensors = {name: array for name, array in self.settings.items() if name in _INPUTS}
        # Without it, prompts that wait in the engine's queue would hold all threads by which the
        # server takes the responses of the calling model, and stall those that are running.
        tensors[ACKNOWLEDGE.name] = ACKNOWLEDGE.tensor(True)
        tensors[INPUT_IDS.name] = INPUT_IDS.tensor(self.prompt_ids)
        return _execute(tensors, self.wanted, self.request_id, dict(self.parameters), self.timeout)

    def abort(self) -> None:
        """Cancels the generation, if it runs."""
        for _ in _execute({ABORT.name: ABORT.tensor(self.request_id)}, ("request_id",)):
            pass


def _execute(
    tensors: Tensors,
    wanted: tuple[str, ...],
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    timeout: int = 0,
) -> Iterator[Tensors]:
    request = pb_utils.InferenceRequest(
        model_name=GROK1.name,
        request_id=request_id,
        correlation_id=uuid.uuid4().hex,
        flags=_ONE_TURN,
        inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
        requested_output_names=list(wanted),
        parameters=parameters or {},
        timeout=timeout,
    )
    for response in request.exec(decoupled=True):
        if response.has_error():
            raise from_triton(response.error())
        outputs = {
            tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()
        }
        if outputs:
            yield outputs
