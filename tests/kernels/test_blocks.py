"""Weights in blocks: their order, and products that equal those of rows to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from grok1_backend.kernels import native
from grok1_backend.model.quantization import (
    BlockedWeight,
    LayerSlice,
    QuantizedWeight8bit,
    matmul,
    products,
)

pytestmark = pytest.mark.skipif(
    not native.available(jnp.float32), reason="no C++ compiler and no built library"
)
BLOCK_COLUMNS = 32


def in_blocks(matrices: NDArray[Any], groups: int = 1) -> NDArray[Any]:
    blocked = matrices.copy()
    native.to_blocks(blocked, groups)
    return blocked


def quads_of(block: NDArray[Any]) -> NDArray[Any]:
    """A group of a block as quads; those of a whole block in runs of 16 and two planes."""
    depth, columns = block.shape
    quads = block.reshape(depth // 4, 4, columns).swapaxes(1, 2)
    if columns < BLOCK_COLUMNS:
        return quads.ravel()
    runs = [quads[first : first + 16] for first in range(0, len(quads), 16)]
    planes = [run.reshape(len(run), 2, 16, 4).swapaxes(0, 1).ravel() for run in runs]
    return np.concatenate(planes)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_the_order_of_blocks(dtype: Any, groups: int) -> None:
    """As `kernels/source/blocks.h` has it; the last block holds what columns are left."""
    depth, columns = 72 * groups, 70
    matrices = np.random.default_rng(0).integers(-128, 128, (2, depth, columns)).astype(dtype)
    blocked = in_blocks(matrices, groups)
    in_quads = not native.takes_blocks(jnp.float32, dtype, depth=6)
    for matrix, ours in zip(matrices, blocked, strict=True):
        blocks = [matrix[:, first : first + BLOCK_COLUMNS] for first in (0, 32, 64)]
        if in_quads:
            parts = [quads_of(part) for block in blocks for part in np.split(block, groups)]
        else:
            parts = [block.ravel() for block in blocks]
        np.testing.assert_array_equal(ours.ravel(), np.concatenate(parts))


def stacks_of(
    rng: np.random.Generator, shape: tuple[int, ...], groups: int
) -> tuple[native.Stack, native.Stack]:
    """Random weights of one layer in rows and in blocks; 0 groups: float32, else int8."""
    scales = None
    if groups:
        weight: NDArray[Any] = rng.integers(-128, 128, (1, *shape)).astype(np.int8)
        scales = jnp.asarray(rng.random((1, *shape[:-2], groups, shape[-1]), np.float32))
    else:
        weight = rng.standard_normal((1, *shape), np.float32)
    blocked = jnp.asarray(in_blocks(weight, max(groups, 1)))
    layer = jnp.int32(0)
    return (
        native.Stack(jnp.asarray(weight), scales, layer),
        native.Stack(blocked, scales, layer, blocked=True),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    quads=st.integers(1, 50),
    groups=st.integers(0, 4),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_equal_those_of_rows(
    rows: int, quads: int, groups: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    depth = 4 * quads * max(groups, 1)
    x = jnp.asarray(rng.standard_normal((rows, depth), np.float32))
    plain, blocked = stacks_of(rng, (depth, columns), groups)
    np.testing.assert_array_equal(native.products(x, [plain])[0], native.products(x, [blocked])[0])


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_experts_equal_those_of_rows(groups: int, rows: int) -> None:
    rng = np.random.default_rng(1)
    shapes = ((4, 64, 104), (4, 64, 104), (4, 104, 64))
    stacks = [stacks_of(rng, shape, groups) for shape in shapes]
    x = jnp.asarray(rng.standard_normal((rows, 64), np.float32))
    chosen = jnp.asarray(rng.integers(0, 4, (rows, 2), np.int32))
    gates = jnp.asarray(rng.random((rows, 2), np.float32))
    results = [
        native.experts(x, chosen, gates, jnp.ones(rows, bool), *of)
        for of in zip(*stacks, strict=True)
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("instructions", ["vnni", "avxvnni", "avx512", "avx2", "base"])
def test_on_every_instruction_set(instructions: str) -> None:
    """In a process that chooses its kernels so; lesser ones where the CPU has none."""
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "those_of_rows or order"]
    environment = os.environ | {
        native.SWITCH: instructions,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "17 passed" in done.stdout


def test_groups_that_are_no_whole_quads_stay_in_rows() -> None:
    """Where bytes are multiplied four at a time; elsewhere there are no quads."""
    stack = native.Stack(jnp.zeros((1, 8, 5), jnp.int8), jnp.ones((1, 4, 5)), jnp.int32(0), True)
    if native.takes_blocks(jnp.float32, jnp.int8, depth=8, groups=4):
        pytest.skip("this CPU multiplies no bytes")
    with pytest.raises(Exception, match="native kernel: not so"):
        jax.block_until_ready(native.products(jnp.zeros((1, 8)), [stack]))


def test_other_dtypes_take_no_blocks() -> None:
    assert not native.takes_blocks(jnp.bfloat16, jnp.int8, depth=64)
    assert not native.takes_blocks(jnp.float32, jnp.bfloat16, depth=64)


@pytest.mark.parametrize("quantized", [False, True])
def test_jax_alone_refuses_them(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take them for rows, and give wrong numbers."""
    weight = jnp.ones((1, 8, 5), jnp.int8 if quantized else jnp.float32)
    stack = QuantizedWeight8bit(weight, jnp.ones((1, 1, 5))) if quantized else weight
    blocked = LayerSlice(BlockedWeight(stack), jnp.int32(0))
    x = jnp.ones((2, 8))
    np.testing.assert_array_equal(products(x, [blocked])[0], 8.0)
    monkeypatch.setattr(native, "available", lambda _: False)
    with pytest.raises(TypeError, match=r"shape \(1, 8, 5\) is in blocks"):
        products(x, [blocked])
    with pytest.raises(TypeError, match="in blocks"):
        matmul(x, blocked)
