"""Only chosen experts are computed, and they give what computing all of them gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.kernels import native
from grok1_backend.model import moe
from grok1_backend.model.moe import ExpertWeights, Routing, chosen_experts
from grok1_backend.model.quantization import LayerSlice, quantize

EXPERTS, WIDTH, FFN, SELECTED, LAYER = 8, 16, 24, 2, 1
Array = np.ndarray[Any, Any]


def dense_experts(
    x: Array, chosen: Array, gates: Array, valid: Array, floats: list[Array]
) -> Array:
    """Every row through every expert, in float64: what `chosen_experts` must be equal to."""
    linear, linear_v, linear_1 = (array.astype(np.float64) for array in floats)
    rows = x.astype(np.float64)
    up = np.einsum("rk,ekn->ern", rows, linear)
    gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    every = np.einsum("ern,enk->erk", gelu * np.einsum("rk,ekn->ern", rows, linear_v), linear_1)
    weights = np.zeros((EXPERTS, len(x)))
    for row, (experts, row_gates) in enumerate(zip(chosen, gates, strict=True)):
        for expert, gate in zip(experts, row_gates, strict=True):
            weights[expert, row] += gate * valid[row]
    return np.einsum("er,erk->rk", weights, every)


def stacked(seed: int, quantized: bool) -> tuple[list[Any], list[Array]]:
    """Three stacks of two layers, and the float matrices of the layer that is used."""
    rng = np.random.default_rng(seed)
    shapes = [(WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH)]
    stacks: list[Any] = []
    floats = []
    for groups, shape in zip((1, 1, 2), shapes, strict=True):
        stack = rng.normal(size=(2, EXPERTS, *shape)).astype(np.float32) / 4
        if quantized:
            weight = quantize(jnp.asarray(stack), groups)
            scales = np.repeat(np.float32(weight.scales), shape[0] // groups, axis=-2)
            floats.append((np.float32(weight.weight) * scales)[LAYER])
            stacks.append(weight)
        else:
            floats.append(stack[LAYER])
            stacks.append(jnp.asarray(stack))
    return stacks, floats


def run(x: Array, chosen: Array, gates: Array, valid: Array, stacks: list[Any]) -> Array:
    """`chosen_experts` on one layer of the stacks, as the scan over layers calls it."""

    @jax.jit
    def compiled(x: Any, chosen: Any, gates: Any, valid: Any, stacks: Any) -> jax.Array:
        layer = jnp.int32(LAYER)
        weights = ExpertWeights(*(LayerSlice(stack, layer) for stack in stacks))
        probabilities = jnp.zeros((len(x), EXPERTS))  # only its shape is looked at
        return chosen_experts(x, Routing(probabilities, chosen, gates), weights, valid)

    return np.asarray(compiled(x, chosen, gates, valid, stacks))


def choices(kind: str, rows: int, rng: np.random.Generator) -> Array:
    """[rows, SELECTED] int32, the experts of a row distinct."""
    if kind == "one pair":  # all rows to two experts, none to the others
        return np.tile(np.int32([5, 2]), (rows, 1))
    if kind == "in turn":
        first = np.arange(rows) % EXPERTS
        return np.stack([first, (first + 3) % EXPERTS], axis=1).astype(np.int32)
    return np.stack([rng.permutation(EXPERTS)[:SELECTED] for _ in range(rows)]).astype(np.int32)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("kind", ["random", "one pair", "in turn"])
def test_equal_to_the_dense_computation(kind: str, quantized: bool) -> None:
    rng = np.random.default_rng(7)
    rows = 150  # more than two blocks of one expert
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    chosen = choices(kind, rows, rng)
    gates = rng.uniform(size=chosen.shape).astype(np.float32)
    valid = rng.uniform(size=rows) < 0.8
    stacks, floats = stacked(3, quantized)
    found = run(x, chosen, gates, valid, stacks)
    expected = dense_experts(x, chosen, gates, valid, floats)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not found[~valid].any()


@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 2**32 - 1))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_blocks_at_every_boundary(valid: list[bool], seed: int) -> None:
    """In JAX, blocks of 3 rows: any number of them, the last one of an expert half full."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(9, WIDTH)).astype(np.float32)
    experts = rng.choice([1, EXPERTS], p=[0.3, 0.7])
    chosen = np.stack([rng.permutation(EXPERTS)[:SELECTED] for _ in range(9)]).astype(np.int32)
    if experts == 1:
        chosen[:, 0], chosen[:, 1] = 6, 0
    gates = rng.uniform(size=chosen.shape).astype(np.float32)
    found = small_blocks(x, chosen, gates, np.array(valid))
    expected = dense_experts(x, chosen, gates, np.array(valid), FLOATS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


FLOATS = stacked(4, quantized=False)[1]
_computed: list[int] = []


@jax.jit
def _blocks_of_three(x: Any, chosen: Any, gates: Any, valid: Any) -> jax.Array:
    def counted(x: jax.Array, weights: ExpertWeights, index: jax.Array) -> jax.Array:
        jax.debug.callback(lambda index: _computed.append(int(index)), index)
        return EXPERT(x, weights, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "BLOCK_ROWS", 3)
        patch.setattr(moe, "expert", counted)
        patch.setattr(native, "available", lambda _: False)
        weights = ExpertWeights(*(jnp.asarray(array) for array in FLOATS))
        routing = Routing(jnp.zeros((len(x), EXPERTS)), chosen, gates)
        return chosen_experts(x, routing, weights, valid)


EXPERT = moe.expert


def small_blocks(x: Array, chosen: Array, gates: Array, valid: Array) -> Array:
    """In blocks of 3 rows; checks that they are as few as the choices allow."""
    _computed.clear()
    found = np.asarray(_blocks_of_three(x, chosen, gates, valid))
    jax.effects_barrier()
    counts = np.bincount(chosen[valid].reshape(-1), minlength=EXPERTS)
    expected = [expert for expert in range(EXPERTS) for _ in range(-(-counts[expert] // 3))]
    assert sorted(_computed) == expected
    return found


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_the_kernels_compute_chosen_experts_only() -> None:
    """Counted in the kernels: pairs of valid rows, and the weights of each chosen expert once."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, WIDTH)).astype(np.float32)
    valid = np.arange(12) < 10
    chosen = choices("one pair", 12, rng)
    chosen[valid.argmin() :] = 7  # of rows that are padding: not computed
    gates = np.ones(chosen.shape, np.float32)
    stacks, _ = stacked(5, quantized=True)
    pairs, weight_bytes = native.counters()
    run(x, chosen, gates, valid, stacks)
    pairs, weight_bytes = (
        a - b for a, b in zip(native.counters(), (pairs, weight_bytes), strict=True)
    )
    assert pairs == 10 * SELECTED
    matrices = 3 * WIDTH * FFN
    assert 2 * matrices <= weight_bytes <= 2 * matrices * 1.5  # two experts, and their scales
