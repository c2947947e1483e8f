"""Reads the log of a tritonserver: what to show while it loads, and why a model did not load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# "I1129 20:43:36.162346 7724 model_lifecycle.cc:472] message": severity, then who, then what.
_LINE = re.compile(r"^(?P<severity>[IWEF])\d{4} \S+ \d+ (?P<file>[^\]]+):\d+\]\s+(?P<text>.*)$")
_LOADING = re.compile(r"^loading: (?P<model>[^:]+):\d+$")
_LOADED = re.compile(r"^successfully loaded '(?P<model>[^']+)'$")
_FAILED = re.compile(r"^failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)$", re.DOTALL)
_UNREADABLE = re.compile(r"^Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)$")
_ENGINE = "grok1: "


class LogFollower:
    """Reads what was added to a growing log since the last call, whole lines only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """The new lines, without their ends."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")

    def close(self) -> None:
        """Closes the file; the log stays."""
        self._file.close()


def progress(line: str) -> str | None:
    """What a user wants to read of a log line while the server starts; None: nothing."""
    text = _message(line)
    if text is None:
        return None
    if text.startswith(_ENGINE):
        return text.removeprefix(_ENGINE)
    if found := _LOADING.match(text):
        return f"loading {found['model']}"
    if found := _LOADED.match(text):
        return f"loaded {found['model']}"
    return None


def failure(line: str) -> str | None:
    """The sentence for a line that says why a model did not load; None: another line."""
    text = _message(line)
    if text is None:
        return None
    found = _FAILED.match(text) or _UNREADABLE.match(text)
    if found is None:
        return None
    # Triton's status code comes first and Python's traceback last; the sentence is between them.
    reason = found["reason"].removeprefix("Internal: ").split("\n\nAt:\n")[0]
    return f"the model {found['model']} did not load: {' '.join(reason.split())}"


def _message(line: str) -> str | None:
    """The text of a log line as it was before Triton quoted it; None: not a log line."""
    found = _LINE.match(line)
    if found is None:
        return None
    text = found["text"]
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        escapes = {"n": "\n", "t": "\t"}
        text = re.sub(r"\\(.)", lambda escape: escapes.get(escape[1], escape[1]), text[1:-1])
    return text
