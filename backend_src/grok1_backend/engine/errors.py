"""The errors a caller of the engine can meet; a message names the field, the value, the limit."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """What went wrong, in the words of gRPC and Triton."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    NOT_FOUND = "NOT_FOUND"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class EngineError(Exception):
    """An error that belongs to one request; the engine and its other requests go on."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(field: str, value: object, limit: str) -> EngineError:
    """An `INVALID_ARG` error in the one form all of them have: field, value, limit."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return EngineError(ErrorCode.INVALID_ARG, f"{field} is {shown}: {limit}")
