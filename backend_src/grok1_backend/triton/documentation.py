"""The tables of docs/interface.md, printed from the models' own.

`python -m grok1_backend.triton.documentation docs/interface.md` renews them in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from grok1_backend.triton.interface import (
    ENGINE_SETTINGS,
    GROK1,
    MODELS,
    PROMPTS,
    TEXT_OUTPUTS,
    Input,
    Model,
    Output,
)

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renew(text: str) -> str:
    """The page with its tables as they are now."""
    return _TABLE.sub(lambda match: f"{match[1]}{_tables()[match[2]]}{match[3]}", text)


def _tables() -> dict[str, str]:
    only_grok1 = [field for field in GROK1.inputs if field not in (*PROMPTS, *ENGINE_SETTINGS)]
    more_outputs = [field for field in GROK1.outputs if field not in TEXT_OUTPUTS]
    return {
        "models": _models(MODELS.values()),
        "inputs": _inputs((*PROMPTS, *ENGINE_SETTINGS)),
        "outputs": _outputs(TEXT_OUTPUTS),
        "grok1_inputs": _inputs(only_grok1),
        "grok1_outputs": _outputs(more_outputs),
    }


def _models(models: Iterable[Model]) -> str:
    rows = (
        (f"`{m.name}`", "stream" if m.decoupled else "one", str(m.max_batch_size)) for m in models
    )
    return _table(("model", "responses", "prompts in a request"), rows)


def _inputs(fields: Iterable[Input]) -> str:
    rows = (
        (f"`{f.name}`", _kind(f), _dims(f), f.default or "-", f.limit or "-", f.meaning)
        for f in fields
    )
    return _table(("input", "type", "dims", "default", "limit", "meaning"), rows)


def _outputs(fields: Iterable[Output]) -> str:
    rows = ((f"`{f.name}`", _kind(f), _dims(f), f.meaning) for f in fields)
    return _table(("output", "type", "dims", "meaning"), rows)


def _kind(field: Output) -> str:
    return field.data_type.removeprefix("TYPE_")


def _dims(field: Output) -> str:
    return str(list(field.dims))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renew(page.read_text()))
