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

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


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


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (page.parent / link).exists()] == []


def test_the_readme_tells_the_makefile_s_variables() -> None:
    told = re.findall(r"`([A-Z_]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    options = re.findall(r"\(call option,[a-z-]+,([A-Z_]+)\)", makefile)
    assert options
    assert [name for name in options if name not in told] == []
