"""Reading packages: R's data base, cleaning, and a package that is not there."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from training.corpus import DEVELOPMENT, HELD_OUT, _clean, _prose, _r_strings, load_corpus


def _record(strings: list[str]) -> bytes:
    """A character vector as R 4 serialises it (XDR, version 3)."""
    record = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500)
    record += struct.pack(">i", 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for text in strings:
        data = text.encode()
        record += struct.pack(">ii", 0x00040009, len(data)) + data
    return record


def test_r_strings() -> None:
    strings = ["It is a truth", "", "£5"]
    assert _r_strings(_record(strings)) == strings


def test_r_strings_refuses_another_type() -> None:
    record = _record([]).replace(struct.pack(">i", 16), struct.pack(">i", 13))
    with pytest.raises(ValueError, match="not an R character vector"):
        _r_strings(record)


def test_prose_joins_the_lines_of_a_paragraph() -> None:
    text = "\ufeffEMMA\r\n\r\n\r\nShe was\r\n_very_ tired. \r\n\r\nHe was not.\r\n"
    assert _prose(text) == "EMMA\n\nShe was very tired.\n\nHe was not."


def test_clean_keeps_the_lines_of_verse() -> None:
    assert (
        _clean("I\n\n\n\n  From fairest\t\nThat thereby\x1a\n")
        == "I\n\n  From fairest\nThat thereby"
    )


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="bible-kjv-text"):
        load_corpus(tmp_path)


def test_no_book_is_both_held_out_and_for_development() -> None:
    assert not HELD_OUT & DEVELOPMENT
