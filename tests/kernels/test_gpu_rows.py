"""Loops over rows in a kernel, interpreted: what they sum, and the sampler's thresholds by them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grok1_backend.engine.filters import filter_by
from grok1_backend.kernels import choice
from grok1_backend.kernels.gpu import each_row, launch, rows


@pytest.mark.parametrize("size", [5, rows.BLOCK, rows.BLOCK + 1, 3 * rows.BLOCK - 7])
def test_sums_are_over_all_of_a_row_and_nothing_else(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRET", True)
    values = np.random.default_rng(0).uniform(size=(3, size)).astype(np.float32)
    limits = np.array([0.1, 2.0, 0.7], np.float32)

    def count(total: rows.Sum, limit: jax.Array) -> jax.Array:
        return total(lambda numbers: jnp.where(numbers <= limit, 1.0, 0.0))

    wanted = np.array([True, True, False])
    found = each_row(count, jnp.asarray(values), jnp.asarray(wanted), jnp.asarray(limits))
    expected = (values <= limits[:, None]).sum(axis=1)
    assert found[:2].tolist() == expected[:2].tolist()


SETTINGS = [  # temperature, top-k, top-p, min-p
    (1.0, 0, 1.0, 0.0),
    (1.0, 40, 0.9, 0.0),
    (0.5, 500, 1.0, 0.0),
    (2.0, 0, 0.6, 0.0),
    (0.7, 3000, 0.8, 0.01),
    (1.0, 10**6, 0.99, 0.0),
]


TYPES = np.float32, np.int32, np.float32, np.float32
VOCABULARY = 9001


@pytest.fixture(scope="module")
def weights() -> list[Callable[..., jax.Array]]:
    """Of a row's tokens after the filters, by the kernel and in JAX; compiled."""

    def compiled(on_gpu: bool) -> Callable[..., jax.Array]:
        def run(logits: jax.Array, *settings: jax.Array) -> jax.Array:
            return filter_by(logits, *settings)[1](logits)

        columns = (jax.ShapeDtypeStruct((len(SETTINGS),), dtype) for dtype in TYPES)
        logits = jax.ShapeDtypeStruct((len(SETTINGS), VOCABULARY), jnp.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "INTERPRET", True)
            patch.setattr(choice, "on_gpu", lambda: on_gpu)
            return jax.jit(run).lower(logits, *columns).compile()

    return [compiled(on_gpu=True), compiled(on_gpu=False)]


@pytest.mark.parametrize("levels", [0, 300], ids=["distinct", "ties"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_thresholds_are_those_of_jax(
    scale: float, levels: int, weights: list[Callable[..., jax.Array]]
) -> None:
    """To the bit: which tokens are left, and their weights; rows near and far beside each other."""
    logits = scale * np.random.default_rng(1).normal(size=(len(SETTINGS), VOCABULARY))
    if levels:
        logits = np.round(logits * levels / scale / 8) * scale / levels
    columns = [np.array(*pair) for pair in zip(zip(*SETTINGS, strict=True), TYPES, strict=True)]
    found, expected = (run(logits.astype(np.float32), *columns) for run in weights)
    assert scale > 1 or (expected[2:] > 0).sum() > 128 * len(SETTINGS)  # thresholds are far
    np.testing.assert_array_equal(found, expected)
