"""The progress log, on a clock of its own."""

from __future__ import annotations

from grok1_backend.checkpoint.progress import ProgressLog


def log_of(calls: list[tuple[float, int]], total: int) -> list[str]:
    """The lines written when `done` bytes are reported at each time."""
    now = 0.0
    lines: list[str] = []
    log = ProgressLog("loading", lines.append, interval=2.0, clock=lambda: now)
    for now, done in calls:  # noqa: B007 (the clock reads it)
        log(done, total)
    return lines


def test_line() -> None:
    (line,) = log_of([(2.0, 50_000_000_000)], 200_000_000_000)
    assert line == "loading [#####...............]  25% 50 GB of 200 GB, 25 GB/s, 6 s left"


def test_last_line_says_how_long_it_took() -> None:
    (line,) = log_of([(100.0, 314_000_000_000)], 314_000_000_000)
    assert line == ("loading [####################] 100% 314 GB of 314 GB, 3.14 GB/s, 1 min 40 s")


def test_a_line_per_interval_and_the_last_always() -> None:
    lines = log_of([(0.5, 1), (1.9, 2), (2.1, 3), (3.0, 4), (4.2, 5), (4.3, 10)], 10)
    assert [line.split("]")[1].split()[0] for line in lines] == ["30%", "50%", "100%"]


def test_nothing_to_read() -> None:
    assert log_of([(0.0, 0)], 0) == ["loading [####################] 100% 0 B of 0 B"]
