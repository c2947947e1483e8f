"""Processes that miss the native library at one time build it once; a stand-in is the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BUILD = """
from grok1_backend.kernels import build
build.library_name = lambda: "library.so"
print(build.find_or_build())
"""
COMPILER = """#!/bin/sh
echo $PPID >> "$FOLDER/calls"
until [ -e "$FOLDER/go" ]; do sleep 0.01; done
for target; do :; done
echo > "$target"
"""
TIMEOUT = 60.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that needs the library; the compiler ends once the file `go` is there."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "calls").touch()
    own = {"FOLDER": str(tmp_path), "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    started: list[subprocess.Popen[str]] = []

    def start_one() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILD]
        started.append(
            subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start_one
    (tmp_path / "go").touch()  # compilers whose process was killed end too
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def builders(tmp_path: Path) -> Callable[[], set[int]]:
    """The processes that have called the compiler."""
    return lambda: set(map(int, (tmp_path / "calls").read_text().split()))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def waits(process: subprocess.Popen[str]) -> bool:
    """Whether the process waits for a lock."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any("->" in lock and str(process.pid) in lock for lock in locks)


def library_of(process: subprocess.Popen[str]) -> Path:
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    return Path(out.strip())


def test_the_second_process_waits_for_the_first(
    start: Callable[[], subprocess.Popen[str]], builders: Callable[[], set[int]], tmp_path: Path
) -> None:
    first = start()
    wait_until(lambda: bool(builders()))
    second = start()
    wait_until(lambda: waits(second) or second.pid in builders())
    (tmp_path / "go").touch()
    assert library_of(first) == library_of(second)
    assert builders() == {first.pid}


def test_the_second_builds_if_the_first_is_killed(
    start: Callable[[], subprocess.Popen[str]], builders: Callable[[], set[int]], tmp_path: Path
) -> None:
    first = start()
    wait_until(lambda: bool(builders()))
    second = start()
    wait_until(lambda: waits(second))
    first.kill()
    (tmp_path / "go").touch()
    assert library_of(second).is_file()
    assert builders() == {first.pid, second.pid}


def test_where_nothing_can_be_locked_it_is_built(
    start: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "grok1-backend" / "library.lock").mkdir(parents=True)
    (tmp_path / "go").touch()
    assert library_of(start()).is_file()
