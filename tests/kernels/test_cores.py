"""Threads that help with a kernel keep off the core of the one that they help."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from grok1_backend.kernels import native

CORES = os.sched_getaffinity(0)
PROGRAM = """
import json, os
import jax, jax.numpy as jnp
from grok1_backend.kernels import native
assert native.available(jnp.float32)
weight = native.Stack(jnp.ones((1, 1024, 2048)), None, jnp.int32(0))
product = jax.jit(lambda x: native.products(x, [weight])[0])
for _ in range(50):
    jax.block_until_ready(product(jnp.ones((8, 1024))))
threads = [int(name) for name in os.listdir("/proc/self/task")]
print(json.dumps([sorted(os.sched_getaffinity(thread)) for thread in threads]))
"""


@pytest.mark.skipif(not native.available(jnp.float32), reason="no native kernels")
@pytest.mark.skipif(len(CORES) < 2, reason="a core has no neighbour")
def test_helpers_keep_off_one_core_and_nobody_else_does() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left_out = [len(CORES - set(of_thread)) for of_thread in json.loads(done.stdout)]
    assert set(left_out) == {0, 1}
