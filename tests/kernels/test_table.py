"""The native product with an embedding table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from grok1_backend.kernels import native

pytestmark = pytest.mark.skipif(
    not native.available(jnp.float32), reason="no C++ compiler and no built library"
)

SHAPES = [(1, 64), (333, 64), (40, 300), (7, 1000), (300, 1024)]


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def int8_table(vocabulary: int, width: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.5, 2, vocabulary).astype(np.float32)
    return rng.integers(-127, 128, (vocabulary, width), np.int8), scales


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 40])
@pytest.mark.parametrize(("vocabulary", "width"), SHAPES)
def test_float_table(rows: int, vocabulary: int, width: int) -> None:
    x, table = random(rows, width), random(vocabulary, width, seed=1)
    ours = native.table_product(jnp.asarray(x), jnp.asarray(table), None)
    np.testing.assert_allclose(ours, x @ table.T, rtol=0, atol=1e-5 * width**0.5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 40])
@pytest.mark.parametrize(("vocabulary", "width"), SHAPES)
def test_int8_table(rows: int, vocabulary: int, width: int) -> None:
    x, (table, scales) = random(rows, width), int8_table(vocabulary, width)
    reference = x.astype(np.float64) @ (table * scales[:, None].astype(np.float64)).T
    ours = native.table_product(jnp.asarray(x), jnp.asarray(table), jnp.asarray(scales))
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6 * abs(reference).max())


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(int8: bool) -> None:
    """To the bit: neither on their values nor, with the same table, on how many they are."""
    x, table, scales = random(40, 300), random(333, 300, seed=1), None
    if int8:
        table, scales = int8_table(333, 300)
    product = jax.jit(native.table_product)
    all_rows = np.asarray(product(x, table, scales))
    for count in (1, 2, 5, 17):
        others = np.concatenate([x[:count], 100 * random(40 - count, 300, seed=2)])
        np.testing.assert_array_equal(product(x[:count], table, scales), all_rows[:count])
        np.testing.assert_array_equal(product(others, table, scales)[:count], all_rows[:count])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_no_number_shows_in_its_row_alone(bad: float, rows: int) -> None:
    table, scales = int8_table(50, 128)
    x = random(rows, 128)
    x[-1, 5] = bad
    logits = np.asarray(native.table_product(jnp.asarray(x), table, scales))
    assert not np.any(np.isfinite(logits[-1]))
    assert np.all(np.isfinite(logits[:-1]))


@pytest.mark.parametrize(
    ("table", "scales"),
    [
        (np.zeros((8, 5), np.float32), None),
        (np.zeros((8, 4), np.int16), None),
        (np.zeros((8, 4), np.int8), None),
        (np.zeros((8, 4), np.int8), np.zeros(7, np.float32)),
        (np.zeros((8, 4), np.float32), np.zeros(8, np.float32)),
    ],
)
def test_wrong_arguments_are_errors(table: jax.Array, scales: jax.Array | None) -> None:
    with pytest.raises(Exception, match="native kernel: not so"):
        jax.block_until_ready(native.table_product(jnp.zeros((1, 4)), table, scales))
