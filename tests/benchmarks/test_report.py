"""The tables of docs/performance.md: what they say of rows, and that the page is up to date."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import report
from results import Row

PAGE = "before\n<!-- table: a -->\nold\n<!-- end -->\nbetween\n<!-- table: b -->\n<!-- end -->\n"


def decode(ours: float, peer: float, floor: float = 100.0) -> dict[str, Any]:
    return Row(
        name="decode",
        unit="tokens/s",
        ours=[ours],
        peers={"other": [peer]},
        floor=floor,
        details={"experts_touched": 7.25, "kv_length": 160},
    ).record()


def test_a_comparison_shows_ours_the_peer_and_the_floor() -> None:
    header, rule, line = report.comparison([decode(50, 40)]).splitlines()
    assert rule == "| --- | --- | --- | --- | --- | --- | --- | --- |"
    assert header == (
        "| what | ours | other | ours ÷ other "
        "| floor | ours ÷ floor | experts touched | KV length |"
    )
    assert line == (
        "| decode | 50 tokens/s | 40 tokens/s | **1.25** | 100 tokens/s | 50% | 7.25 | 160 |"
    )


def test_peers_are_named_in_their_rows_where_they_differ() -> None:
    second = Row(name="second", unit="s", ours=[1.0], peers={"another": [2.0]}).record()
    header, _, *lines = report.comparison([decode(50, 40), second]).splitlines()
    assert header.startswith("| what | ours | best peer | ours ÷ peer |")
    assert "| 40 tokens/s (other) |" in lines[0]
    assert "| 2 s (another) |" in lines[1]


def test_columns_that_no_row_has_are_left_out() -> None:
    alone = Row(name="start", unit="s", ours=[0.0125]).record()
    assert report.comparison([alone]).splitlines()[-1] == "| start | 12.5 ms |"


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "named"),
    [("tokens/s", 1, 2, True), ("tokens/s", 2, 1, False), ("s", 2, 1, True), ("s", 1, 2, False)],
)
def test_rows_where_a_peer_is_ahead_are_named(
    unit: str, ours: float, peer: float, named: bool
) -> None:
    row = Row(name="the row", unit=unit, ours=[ours], peers={"other": [peer]}).record()
    assert ("the row" in report.behind([row])) is named


def test_targets_compare_figures_of_rows() -> None:
    rows = {"decode": decode(50, 40), "more": decode(120, 60)}
    target = report.Target("", "decode", "other", 1.2)
    assert target.value(rows) == 1.25
    assert target.met(1.25)
    assert dataclasses.replace(target, of="floor").value(rows) == 0.5
    assert dataclasses.replace(target, of="best peer").value(rows) == 1.25
    assert dataclasses.replace(target, row="more", of_row="decode").value(rows) == 3
    assert dataclasses.replace(target, of="1").value(rows) == 50
    assert dataclasses.replace(target, of="none such").value(rows) is None
    assert dataclasses.replace(target, row="none such").value(rows) is None
    assert not dataclasses.replace(target, at_most=True).met(1.25)


def test_a_target_takes_the_ratio_of_paired_samples() -> None:
    rows = {"row": {**decode(3, 5), "ratio": 0.5}}
    for of in ("other", "best peer"):
        assert report.Target("", "row", of, 1).value(rows) == 0.5


def test_joined_responses_are_shown() -> None:
    details = {"responses_per_token": 0.25}
    row = Row(name="row", unit="tokens/s", ours=[1.0], details=details).record()
    header, _, line = report.comparison([row]).splitlines()
    assert header.endswith("| responses a token |")
    assert line.endswith("| 0.25 |")


def test_targets_that_were_not_measured_say_so() -> None:
    assert report.targets([]).count("not measured") == len(report.TARGETS)


def test_only_what_is_between_the_marks_changes() -> None:
    filled = report.fill(PAGE, {"b": "new"})
    assert filled == PAGE.replace("b -->\n", "b -->\nnew\n")
    assert report.fill(filled, {"b": "new"}) == filled
    with pytest.raises(ValueError, match="no place for the table c"):
        report.fill(PAGE, {"c": "new"})


def test_the_page_says_what_the_results_say() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.fill(page, report.tables(report.load())) == page


@pytest.mark.parametrize(
    ("value", "shown"), [(0.01234, "0.0123"), (12.345, "12.3"), (393216, "393216"), (None, "")]
)
def test_numbers_have_three_digits_and_no_exponent(value: float | None, shown: str) -> None:
    assert report.number(value) == shown


def test_growth_has_a_line_for_each_figure_and_axis() -> None:
    rows = [
        Row(
            name="",
            unit="s",
            ours=[at / 1e3],
            details={"what": "a step", "by": by, "at": at},
        ).record()
        for by, at in (("slots", 1), ("slots", 8), ("queue", 10_000))
    ]
    assert report.growth(rows).splitlines()[2:] == [
        "| a step | slots | 1: 1 ms; 8: 8 ms |",
        "| a step | queue | 10,000: 10 s |",
    ]
