"""Engines under measurement: their protocol, that idle ones stand still, and failing ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contenders import Contenders
from floor import ITEM_BYTES, expected_experts, needs
from peers.worker import decode_window, prompts
from workers import Worker, WorkerError

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
ENGINE = f"""
import os, sys, time
sys.path.append({str(PEERS)!r})
from worker import reserve_output, serve
send = reserve_output()
print("a library's greeting")
def twice(value):
    if value < 0:
        raise ValueError("negative")
    return {{"value": 2 * value}}
handlers = {{"twice": twice, "exit": lambda: os._exit(3), "sleep": lambda: time.sleep(60)}}
serve(send, handlers, {{"engine": "1"}})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    command = [sys.executable, "-c", ENGINE]
    with Worker("engine", command, log=tmp_path / "log", timeout=10) as running:
        yield running


def state(worker: Worker) -> str:
    return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_engine_answers_and_stands_still_between_its_turns(worker: Worker) -> None:
    assert worker.versions == {"engine": "1"}
    assert worker.call("twice", value=4) == {"value": 8}
    end = time.monotonic() + 5
    while state(worker) != "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert state(worker) == "T"
    assert worker.call("twice", value=5) == {"value": 10}


def test_an_error_is_told_and_the_engine_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="engine: ValueError: negative"):
        worker.call("twice", value=-1)
    assert worker.call("twice", value=1) == {"value": 2}


def test_an_engine_that_ends_is_told(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="engine has ended: a library's greeting"):
        worker.call("exit")


def test_an_engine_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="engine has ended: no such model"):
        Worker("engine", [sys.executable, "-c", "exit('no such model')"], log=tmp_path / "log")


def test_an_engine_that_does_not_answer_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENGINE]
    with (
        Worker("engine", command, log=tmp_path / "log", timeout=10) as worker,
        pytest.raises(WorkerError, match="did not answer"),
    ):
        worker.call("sleep", timeout=0.2)


def test_a_peer_that_is_not_installed_is_missing_and_the_others_go_on(tmp_path: Path) -> None:
    with Contenders(tmp_path / "cache", tmp_path / "nothing installed") as contenders:
        assert not contenders.ready("vLLM Mixtral F32")
        assert "vLLM Mixtral F32" in contenders.missing
    with Contenders(tmp_path / "cache", None) as contenders:
        assert not contenders.ready("vLLM Mixtral F32")
        assert not contenders.missing  # it was not asked for


def test_prompts_are_distinct_and_the_same_for_every_engine() -> None:
    batch = prompts(3, 8, 64, 32768)
    assert batch == prompts(3, 8, 64, 32768)
    assert batch != prompts(4, 8, 64, 32768)
    assert len({tuple(prompt) for prompt in batch}) == 8
    assert prompts(3, 8, 65, 32768)[0][:64] != batch[0]
    assert prompts(3, 7, 64, 32768)[0] != batch[0]
    assert all(300 <= token < 32768 for prompt in batch for token in prompt)


def test_a_rate_counts_tokens_while_all_requests_decode() -> None:
    times = [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0]]
    assert decode_window(times) == {"tokens": 6, "seconds": 3.0}  # from 2 to 5


def test_the_floor_of_one_token_reads_two_experts_a_layer_and_the_embedding() -> None:
    """The benchmark's model: 446.8 MB in float32, 118.7 in int8 less the scales of Q8_0."""
    float32 = needs(1, 1, 0, weights="float32")
    int8 = needs(1, 1, 0, weights="int8", embedding="int8")
    assert float32.bytes == pytest.approx(446.8e6, rel=0.001)
    assert int8.bytes == pytest.approx(446.8e6 / 4, rel=0.001)
    assert int8.int8_op == pytest.approx(2 * 446.8e6 / 4, rel=0.001)


def test_the_floor_of_many_tokens_reads_each_expert_once() -> None:
    assert expected_experts(1) == pytest.approx(2)
    assert expected_experts(8) == pytest.approx(7.2, abs=0.01)
    few, many = (needs(rows, 1, 0, weights="int8", experts=8) for rows in (16, 32))
    assert many.bytes == pytest.approx(few.bytes, rel=0.001)
    assert many.int8_op == 2 * few.int8_op
    assert set(ITEM_BYTES) == {"int8", "float32"}
