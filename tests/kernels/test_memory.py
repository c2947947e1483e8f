"""The memory of weights."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from grok1_backend.kernels.memory import HUGE_PAGES

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import ctypes, re
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 20))), 1, ctypes.c_size_t(64 << 20))
print(re.search(r"AnonHugePages: *(\\d+) kB", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.skipif(
    not (THP.exists() and "[never]" not in THP.read_text())
    or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35),
    reason="no huge pages, or a glibc that does not ask for them",
)
def test_large_arrays_lie_in_huge_pages() -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, **HUGE_PAGES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 32 << 10
