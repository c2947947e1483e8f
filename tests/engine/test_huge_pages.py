"""Large arrays of the running model lie in huge pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grok1_backend.engine.huge_pages import collapse

SIZE = 64 * 2**20


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has them")
def test_an_array_goes_to_huge_pages_and_keeps_its_place_and_values() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file():
        pytest.skip("this kernel has no huge pages")
    if tuple(map(int, re.findall(r"\d+", Path("/proc/version").read_text())[:2])) < (6, 1):
        pytest.skip("this kernel cannot be asked for them")
    array = jax.block_until_ready(jnp.arange(SIZE // 4, dtype=jnp.int32))
    address = array.unsafe_buffer_pointer()
    collapse({"one": array, "too small": jnp.zeros(3)})
    assert array.unsafe_buffer_pointer() == address
    assert huge_bytes_at(address + SIZE // 2) >= SIZE // 2
    np.testing.assert_array_equal(array, np.arange(SIZE // 4))
