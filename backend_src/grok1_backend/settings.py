"""Reads a frozen dataclass from a table of plain values: the one way all configuration is read."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """Builds `cls` from a table, checking names and types; values are checked by `cls` itself.

    Args:
      cls: a dataclass.
      table: field name to value; lists are taken for tuples, integers for floats.
      where: what the table is called in errors, such as `[engine]`.

    Raises:
      ValueError: an unknown field (the nearest known one is named), a missing one, or a value of
        another type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where} has an unknown field {name}{hint}")
        values[name] = _convert(hints[name], value, f"{where} {name}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ValueError(f"{where} lacks the field {name}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def _convert(hint: Any, value: Any, name: str) -> Any:
    kind = typing.get_origin(hint)
    if kind in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _convert(options[0], value, name)
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is {value!r}: a list")
        element = typing.get_args(hint)[0]
        return tuple(_convert(element, item, name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{name} is {value!r}: {hint.__name__} expected")
    return value
