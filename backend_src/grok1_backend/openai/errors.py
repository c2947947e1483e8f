"""The errors of the gateway, as OpenAI's clients read them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from grok1_backend.engine.errors import EngineError

# 503 is what OpenAI answers when it is overloaded too: its clients try again.
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.NOT_FOUND: 503,  # the model is not loaded
    grpc.StatusCode.CANCELLED: 504,  # the longest generation time has passed, or an `abort` came
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_SHOWN = 80


class ApiError(Exception):
    """What a request gets in place of an answer, or of the rest of one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_field(field: str, value: object, limit: str) -> ApiError:
    """A 400 in the form that the engine's errors have: field, value, limit."""
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return ApiError(400, f"{field} is {shown}: {limit}", param=field)


def of_engine(error: EngineError) -> ApiError:
    """What this process's own use of the tokenizer raised."""
    return ApiError(400, error.message)


def of_server(error: grpc.RpcError) -> ApiError:
    """What Triton answered, or the lack of an answer."""
    message = error.details() or "the server gave no reason"
    status = _STATUS.get(error.code(), 500)
    if status != 400:
        return ApiError(status, message)
    message = message.replace(" in sampling_parameters", "", 1).replace("stop_words", "stop", 1)
    named = re.match(r"(?:the number of |a token of )?(\w+) is ", message)
    return ApiError(status, message, param=named[1] if named else None)


def of_validation(errors: Sequence[Mapping[str, Any]], known: Sequence[str]) -> ApiError:
    """The first of the errors that pydantic found in a request.

    Args:
      errors: pydantic's, at least one.
      known: names of the fields that there are.
    """
    error = errors[0]
    where = ".".join(str(part) for part in error["loc"] if part != "body")
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {error['ctx']['error']}")
    if error["type"] == "missing":
        return ApiError(400, f"{where or 'the body'} is missing", param=where or None)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return bad_field(where, error["input"], f"there is no such field here{hint}")
    reason = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not where:  # of several fields: its words name them
        first = reason.split()[0]
        return ApiError(400, reason, param=first if first in known else None)
    return bad_field(where or "the body", error["input"], reason[0].lower() + reason[1:])
