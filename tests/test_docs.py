"""What the documents say about configuration is what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.model.config import GrokConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize(
    ("table", "cls"),
    [("model", GrokConfig), ("runner", RunnerSettings), ("engine", EngineSettings)],
)
def test_configuration_lists_every_field_and_its_default(table: str, cls: type[Any]) -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    section = text.split(f"## [{table}]")[1].split("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? *\|", section, re.MULTILINE))
    expected = {
        field.name: "" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(cls)
    }
    assert documented == expected
