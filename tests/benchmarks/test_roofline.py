"""The roofline's arithmetic, by hand; and that the page has what the script says."""

from __future__ import annotations

import dataclasses

import pytest
import roofline

from grok1_backend.engine.memory_plan import released_weights
from grok1_backend.model.config import load_config

CONFIG = load_config(roofline.CONFIG)
GPU = roofline.Hardware("8 x GPU", bandwidth=1e12, arithmetic=1e15, link=1e11, all_reduce=1e-5)


@pytest.mark.parametrize(("rows", "experts"), [(1, 2), (2, 3.5), (8, 7.1991), (1000, 8)])
def test_distinct_experts(rows: int, experts: float) -> None:
    assert roofline.distinct_experts(CONFIG, rows) == pytest.approx(experts, abs=1e-4)


def test_all_reduces_of_little_and_of_much() -> None:
    """Seven others read whole, or two passes over an eighth of each."""
    assert roofline.all_reduce_seconds(GPU, 100_000) == pytest.approx(1e-5 + 700_000 / 1e11)
    assert roofline.all_reduce_seconds(GPU, 800_000) == pytest.approx(1e-5 + 1_400_000 / 1e11)


def test_many_requests_read_all_weights_and_their_kv_once() -> None:
    """A position takes 64 layers x 2 x 128 x 2 bytes on a GPU that has one of 8 KV heads."""
    step = roofline.decode_step(CONFIG, GPU, rows=500, context=100)
    expected = released_weights(CONFIG, 8) + 500 * 100 * 64 * 2 * 128 * 2
    assert step.bytes_read == pytest.approx(expected)
    assert step.memory == pytest.approx(expected / 1e12)


def test_one_request_reads_two_experts_of_each_layer() -> None:
    one, all_rows = (roofline.decode_step(CONFIG, GPU, rows, context=0) for rows in (1, 500))
    experts = 64 * 3 * (6144 * 32768 + 32768 * 2 + 6144 * 2) // 8  # int8, and bfloat16 scales
    assert all_rows.bytes_read - one.bytes_read == pytest.approx(6 * experts, rel=1e-3)
    assert one.all_reduces == pytest.approx(128 * (1e-5 + 7 * 6144 * 4 / 1e11))


def test_arithmetic_of_many_rows() -> None:
    """Every expert that is used takes all rows."""
    step = roofline.decode_step(CONFIG, GPU, rows=64, context=0)
    projections = 6144 * (6144 + 1024 + 1024) + 6144 * 6144
    weights = 64 * (step.experts * 3 * 6144 * 32768 + projections) + 131072 * 6144
    assert step.arithmetic == pytest.approx(2 * 64 * weights / 8 / 1e15)


@pytest.mark.parametrize(
    ("changes", "binds"),
    [
        ({}, "memory"),
        ({"arithmetic": 1e13}, "arithmetic"),
        ({"all_reduce": 1.0}, "all-reduces"),
    ],
)
def test_what_binds(changes: dict[str, float], binds: str) -> None:
    hardware = dataclasses.replace(GPU, **changes)
    step = roofline.decode_step(CONFIG, hardware, rows=32, context=1024)
    assert step.binds == binds
    assert step.least == max(step.memory, step.arithmetic) + step.all_reduces


def test_the_page_has_the_section_as_computed() -> None:
    page = roofline.PAGE.read_text(encoding="utf-8")
    assert roofline.filled(page) == page
