"""Values as clients send them, tensors, request parameters, JSON, turned into plain Python ones.

Each way of sending has its own habits: JSON has numbers in strings (vLLM's clients), parameters
have integers where a float is meant, tensors have exact types but any shape within their dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.errors import invalid
from grok1_backend.triton.interface import Input, Output

_TRUTH = {"true": True, "false": False, "1": True, "0": False}


def from_tensor(field: Output, array: NDArray[np.generic]) -> Any:
    """The value of a tensor: a scalar, or a tuple of them where it is a list.

    Args:
      field: which tensor.
      array: [1, n] for one prompt.

    Raises:
      EngineError: INVALID_ARG for a text that is not UTF-8, or a scalar input without a value.
    """
    values: list[Any] = array.reshape(-1).tolist()
    if field.data_type == "TYPE_STRING":
        values = [_text(field.name, value) for value in values]
    if field.dims != (1,):
        return tuple(values)
    if len(values) != 1:
        raise invalid(f"the number of values of {field.name}", len(values), "exactly 1")
    return values[0]


def from_plain(field: Input, value: object, *, where: str) -> Any:
    """The value of a scalar input from a request parameter or JSON.

    Args:
      field: which input.
      value: a number, boolean or string; strings may hold numbers and booleans.
      where: what to call it in errors.

    Raises:
      EngineError: INVALID_ARG for another type than the input's.
    """
    convert = {
        "TYPE_BOOL": to_bool,
        "TYPE_INT32": to_int,
        "TYPE_UINT64": to_int,
        "TYPE_FP32": to_float,
        "TYPE_STRING": to_text,
    }
    return convert[field.data_type](where, value)


def to_bool(name: str, value: object) -> bool:
    """True, False, 1, 0 or one of them as a string."""
    known = _TRUTH.get(str(value).lower())
    if known is None:
        raise invalid(name, value, "true or false")
    return known


def to_int(name: str, value: object) -> int:
    """An integer, also as a string or as a float without a fraction."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        return int(value)
    except (ValueError, OverflowError):
        raise invalid(name, value, "an integer") from None


def to_float(name: str, value: object) -> float:
    """A number, also as a string; whether it is finite is judged with its limits."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise invalid(name, value, "a number") from None


def to_text(name: str, value: object) -> str:
    """A string that has UTF-8, which JSON's strings need not have."""
    if not isinstance(value, str):
        raise invalid(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        limit = f"no surrogate code point, as there is at index {error.start}"
        raise invalid(name, value, limit) from None
    return value


def to_list(name: str, value: object) -> list[Any]:
    """A list, or one value in place of a list of one."""
    if isinstance(value, list):
        return value
    if isinstance(value, str | int) and not isinstance(value, bool):
        return [value]
    raise invalid(name, value, "a list")


def to_object(name: str, value: object) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise invalid(name, value, "a JSON object")
    return value


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, value, f"UTF-8, which it is not at byte {error.start}") from None
