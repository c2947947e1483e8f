"""Stands in for the module that exists only inside a running tritonserver."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class TritonError:
    INVALID_ARG, UNAVAILABLE, NOT_FOUND, CANCELLED, INTERNAL = range(5)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.array for tensor in output_tensors}
        self.error = error


class Sender:
    """Notes what a model sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse, int]] = []
        self.is_gone = False

    def send(self, response: InferenceResponse, flags: int) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not any(flags for _, flags in self.sent), "asked after the final response"
        return self.is_gone


class Request:
    """A request as `execute` gets it, as far as responses need one."""

    def __init__(self, *wanted: str) -> None:
        self.sender = Sender()
        self._wanted = wanted

    def get_response_sender(self) -> Sender:
        return self.sender

    def requested_output_names(self) -> tuple[str, ...]:
        return self._wanted


def _stand_in() -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    for kind in (TritonError, Tensor, InferenceResponse):
        setattr(module, kind.__name__, kind)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    module.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1  # type: ignore[attr-defined]
    module.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2  # type: ignore[attr-defined]
    return module


# Before any test module of this folder imports what needs it.
sys.modules.setdefault("triton_python_backend_utils", _stand_in())


@pytest.fixture
def request_of_triton() -> type[Request]:
    return Request
