"""Settings that come from the environment or from config.pbtxt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grok1_backend.triton.environment import keep_to_cpus

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROK1_CPUS", raising=False)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that may be kept to some processors, as it ends with the test."""
    with ThreadPoolExecutor(1) as made:
        yield made


def kept(thread: ThreadPoolExecutor, **parameters: str) -> set[int]:
    """The processors that are left to the thread."""
    thread.submit(keep_to_cpus, parameters).result()
    return thread.submit(os.sched_getaffinity, 0).result()


def test_without_a_setting_all_processors_are_used(thread: ThreadPoolExecutor) -> None:
    assert kept(thread) == set(CPUS)


def test_processors_are_numbers_and_ranges(thread: ThreadPoolExecutor) -> None:
    assert kept(thread, cpus=str(CPUS[-1])) == {CPUS[-1]}
    assert kept(thread, cpus=",".join(map(str, CPUS))) == set(CPUS)
    assert kept(thread, cpus=f"{CPUS[0]}-{CPUS[0]},{CPUS[-1]}") == {CPUS[0], CPUS[-1]}


def test_the_environment_goes_first(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROK1_CPUS", str(CPUS[-1]))
    assert kept(thread, cpus=",".join(map(str, CPUS))) == {CPUS[-1]}


@pytest.mark.parametrize("text", ["all", "0,", "1-", "-1", "0 1", "0-999999999999"])
def test_what_is_no_list_is_refused(thread: ThreadPoolExecutor, text: str) -> None:
    with pytest.raises(ValueError, match=f"cpus is '{text}': numbers of processors, such as 0-5,8"):
        kept(thread, cpus=text)


@pytest.mark.parametrize("text", ["99999", f"{CPUS[0]},99999", "3-2"])
def test_processors_that_are_not_there_are_refused(thread: ThreadPoolExecutor, text: str) -> None:
    with pytest.raises(ValueError, match=f"cpus is '{text}': not all of them can be used here"):
        kept(thread, cpus=text)
