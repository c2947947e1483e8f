"""Calls of `grok1` from within the server, for the models that show it without sequences.

Each call is a sequence of one turn (START and END) under a correlation id of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.triton.channel import Inbox
from grok1_backend.triton.handover import Handover
from grok1_backend.triton.interface import (
    ABORT,
    ERROR,
    FINISH_REASON,
    GROK1,
    INPUT_IDS,
    INTERNAL,
    Tensors,
    Values,
)
from grok1_backend.triton.relay import Part, Receiver
from grok1_backend.triton.responses import CallName, drop_kept_tensors
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
    _LATE_SECONDS = 60.0
    """How long after a call's own end its last event may wait to be taken."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._receivers: dict[str, Receiver] = {}
        self._handover: Handover[Receiver, Part] = Handover("responses", self._receive)
        self._inbox = Inbox(self._hand_over)
        self._ended: deque[tuple[float, object]] = deque()
        self._lock = threading.Lock()

    def follow(self, call: Call, take: Callable[[Values], None]) -> None:
        """Makes the call and returns when its last response was taken.

        Args:
          call: what to generate.
          take: gets the outputs of each response, in order, on a thread that does so for all
            calls: a step's responses to them come together. Once it has raised it gets no more.

        Raises:
          EngineError: what `grok1` answered with, or INTERNAL after `take` has raised.
        """
        tensors = {name: array for name, array in call.settings.items() if name in _INPUTS}
        tensors[INPUT_IDS.name] = INPUT_IDS.tensor(call.prompt_ids)
        receiver = Receiver(take)
        name = self._new_name()
        self._receivers[name.number] = receiver
        try:
            for _ in self._execute(
                name, tensors, call.wanted, call.request_id, call.parameters, call.timeout
            ):
                pass  # it says no more than that it was taken in, and then that it has ended
            if not receiver.ended.wait(self._LATE_SECONDS):
                raise EngineError(ErrorCode.INTERNAL, "grok1 ended without an answer")
        finally:
            del self._receivers[name.number]
        if receiver.error is not None:
            raise receiver.error

    def abort(self, call: Call) -> None:
        """Cancels the generation, if it runs."""
        tensors: Tensors = {ABORT.name: ABORT.tensor(call.request_id)}
        for _ in self._execute(self._new_name(), tensors, (FINISH_REASON.name,)):
            pass

    def close(self) -> None:
        """Lets go of what is kept, while Python still runs."""
        self._inbox.close()
        self._handover.close()
        time.sleep(self._FORGOTTEN_SECONDS)
        self._ended.clear()
        drop_kept_tensors()

    def _hand_over(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if receiver := self._receivers.get(part.number):  # None: the call has failed here
                self._handover.put(receiver, part)

    def _receive(self, waiting: Mapping[Receiver, Sequence[Part]]) -> None:
        for receiver, parts in waiting.items():
            receiver.receive(parts)

    def _new_name(self) -> CallName:
        return CallName(self._inbox.address, str(next(self._numbers)))

    def _execute(
        self,
        name: CallName,
        tensors: Tensors,
        wanted: tuple[str, ...],
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        timeout: int = 0,
    ) -> Iterator[Tensors]:
        tensors = tensors | {INTERNAL.name: INTERNAL.tensor(str(name))}
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
