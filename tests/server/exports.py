"""What perf_analyzer exports of its measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def export_of(measure: Callable[[], object], export: Path) -> dict[str, Any]:
    """The export of a measurement, which is repeated where it is cut off.

    perf_analyzer writes no more of an export once an empty tensor's memory reads as NaN, rarely.
    """
    for _ in range(3):
        export.unlink(missing_ok=True)
        measure()
        try:
            found: dict[str, Any] = json.loads(export.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue
        return found
    pytest.fail(f"{export.name}: three exports were cut off")
