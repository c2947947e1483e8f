"""Products with int8 weights in integer arithmetic: exact sums on every instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from grok1_backend.kernels import native

Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(
    not native.available(jnp.float32), reason="no C++ compiler and no built library"
)

ROUNDING = 4 * 2.0**-23
"""Of a product, relative to the lengths of its row and of its column."""


def error(ours: Floats, x: Floats, weight: NDArray[np.int8], scales: Floats) -> float:
    """The largest distance from float64, relative to the lengths of row and column."""
    groups = np.repeat(scales.astype(np.float64), weight.shape[0] // scales.shape[0], axis=0)
    dense = weight * groups
    lengths = np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(dense, axis=0)
    return float(np.max(np.abs(ours - x.astype(np.float64) @ dense) / np.maximum(lengths, 1e-30)))


def product(x: Floats, weight: NDArray[np.int8], scales: Floats, bfloat16: bool) -> Floats:
    held = jnp.asarray(scales, jnp.bfloat16 if bfloat16 else jnp.float32)[None]
    stack = native.Stack(jnp.asarray(weight)[None], held, jnp.int32(0))
    return np.asarray(native.products(jnp.asarray(x), [stack])[0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    group_depth=st.integers(1, 200),
    groups=st.integers(1, 4),
    columns=st.integers(1, 200),
    bfloat16=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_equals_float64(
    rows: int, group_depth: int, groups: int, columns: int, bfloat16: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    depth = group_depth * groups
    magnitude = np.exp(4 * rng.standard_normal((rows, 1)))
    x = (rng.standard_normal((rows, depth)) * magnitude).astype(np.float32)
    weight = rng.integers(-128, 128, (depth, columns), np.int8)
    scales = rng.random((groups, columns), np.float32)
    if bfloat16:
        scales = np.asarray(jnp.asarray(scales, jnp.bfloat16), np.float32)
    assert error(product(x, weight, scales, bfloat16), x, weight, scales) < ROUNDING


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-38, 1e36, -1e36])
def test_rows_of_extreme_values(value: float) -> None:
    """The smallest numbers may count as 0; nothing overflows that does not in float32."""
    x = np.full((1, 64), value, np.float32)
    weight = np.ones((64, 3), np.int8)
    ours = product(x, weight, np.full((1, 3), 2.0**-7, np.float32), False)
    np.testing.assert_allclose(ours, value / 2, rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_shows_in_its_row_alone(value: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 7] = value
    ours = product(x, np.ones((64, 3), np.int8), np.ones((1, 3), np.float32), False)
    assert not np.any(np.isfinite(ours[1]))
    np.testing.assert_array_equal(ours[[0, 2]], 64.0)


PROGRAM = """
import json, jax.numpy as jnp, numpy as np
from grok1_backend.kernels import native
assert native.available(jnp.float32)
rng = np.random.default_rng(0)
results = []
for depth, columns, groups in ((64, 64, 1), (300, 130, 3), (100, 4200, 1)):
    weight = jnp.asarray(rng.integers(-128, 128, (1, depth, columns), np.int8))
    scales = jnp.asarray(rng.random((1, groups, columns), np.float32))
    stack = native.Stack(weight, scales, jnp.int32(0))
    for rows in (1, 2, 5, 6, 17, 40, 241):
        x = jnp.asarray(rng.standard_normal((rows, depth), np.float32))
        product = native.products(x, [stack])[0]
        results.append(np.asarray(product)[:, :: 1 + columns // 200].ravel().tolist())
print(json.dumps(results))
"""


def results_with(instructions: str) -> list[Floats]:
    environment = {**os.environ, native.SWITCH: instructions}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [np.array(values, np.float32) for values in json.loads(done.stdout)]


def test_instruction_sets_agree_to_the_bit_where_sums_are_integers() -> None:
    """A name that this CPU does not have takes the next lesser one, at last float32."""
    best = results_with("")
    exact = 0
    for instructions in ("vnni", "avxvnni", "avx512", "avx2"):
        ours = results_with(instructions)
        for a, b in zip(ours, best, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * abs(b).max())
        exact += all(np.array_equal(a, b) for a, b in zip(ours, best, strict=True))
    with open("/proc/cpuinfo") as file:
        flags = set(file.read().split())
    assert exact >= len({"avx512_vnni", "avx_vnni"} & flags)
