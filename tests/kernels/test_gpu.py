"""The kernels for GPUs, interpreted, against the same computation in JAX; and that they compile.

No GPU runs here. Interpreted, a kernel's body is the one that a GPU gets; lowering for CUDA goes
through Pallas' own checks of what Triton can do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus_meant import gpus_meant
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.kernels import choice, native
from grok1_backend.kernels.gpu import attention, experts, launch, products, takes
from grok1_backend.kernels.gpu.experts import blocks_in_place, blocks_sorted
from grok1_backend.kernels.native import Stack
from grok1_backend.model.attention import KVPool, PagedContext, attend_pages
from grok1_backend.model.config import load_config
from grok1_backend.model.moe import ExpertWeights, Routing, chosen_experts
from grok1_backend.model.quantization import LayerSlice, matmul, quantize

LAYERS, EXPERTS, WIDTH, FFN, SELECTED = 2, 8, 48, 96, 2
LAYER = jnp.int32(1)
CONFIG = dataclasses.replace(load_config("tiny"), attn_logit_cap=3.0)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Of the largest magnitude. bfloat16 has 8 bits: a sum in another order is rounded otherwise."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run here, and what they are compared with runs in JAX."""
    monkeypatch.setattr(launch, "INTERPRET", True)
    monkeypatch.setattr(native, "available", lambda _: False)


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.cache
def weight(*shape: int, groups: int, seed: int) -> Any:
    """A stack; 0 groups: float32, else int8 with so many groups of scales."""
    floats = random(*shape, seed=seed) * 0.3
    return quantize(floats, groups) if groups else floats


def stack_of(weight: Any) -> Stack:
    scales = getattr(weight, "scales", None)
    return Stack(weight if scales is None else weight.weight, scales, LAYER)


def expert_weights(groups: int) -> list[Any]:
    shapes = [(WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH)]
    return [
        weight(LAYERS, EXPERTS, *shape, groups=groups, seed=seed)
        for seed, shape in enumerate(shapes)
    ]


@jax.jit
def run_experts(x: Any, chosen: Any, gates: Any, valid: Any, weights: list[Any]) -> jax.Array:
    return experts(x, chosen, gates, valid, *(stack_of(weight) for weight in weights))


@jax.jit
def in_jax(x: Any, chosen: Any, gates: Any, valid: Any, weights: list[Any]) -> jax.Array:
    routing = Routing(jnp.zeros((len(x), EXPERTS)), chosen, gates)
    slices = ExpertWeights(*(LayerSlice(weight, LAYER) for weight in weights))
    return chosen_experts(x, routing, slices, valid)


@jax.jit
def run_products(x: Any, weights: list[Any]) -> list[jax.Array]:
    return products(x, [stack_of(weight) for weight in weights])


def choices(kind: str, rows: int) -> jax.Array:
    """[rows, SELECTED] int32, the experts of a row distinct."""
    rng = np.random.default_rng(rows)
    if kind == "one pair":
        return jnp.asarray(np.tile(np.int32([5, 2]), (rows, 1)))
    drawn = [rng.permutation(EXPERTS)[:SELECTED] for _ in range(rows)]
    return jnp.asarray(np.array(drawn, np.int32))


def close(found: jax.Array, expected: jax.Array, dtype: str) -> None:
    found, expected = (jnp.asarray(array, jnp.float32) for array in (found, expected))
    largest = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize(
    ("rows", "kind", "groups", "dtype"),
    [
        (1, "random", 1, "bfloat16"),  # decode: every expert has one block
        (33, "random", 3, "bfloat16"),
        (64, "one pair", 1, "float32"),
        (65, "random", 3, "float32"),  # prefill: sorted, the last blocks half full
        (150, "one pair", 1, "bfloat16"),  # one expert has several blocks, six have none
        (70, "random", 0, "float32"),  # float weights
    ],
)
def test_experts(rows: int, kind: str, groups: int, dtype: str) -> None:
    x = random(rows, WIDTH, seed=9).astype(dtype)
    chosen, gates = choices(kind, rows), jax.nn.sigmoid(random(rows, SELECTED, seed=8))
    valid = jnp.arange(rows) % 5 != 3
    weights = expert_weights(groups)
    found = run_experts(x, chosen, gates, valid, weights)
    close(found, in_jax(x, chosen, gates, valid, weights), dtype)
    assert not found[~valid].any()


def test_rows_that_are_all_invalid_compute_nothing() -> None:
    """The outputs of blocks that do not run are not numbers when interpreted."""
    weights = expert_weights(1)
    for rows in (3, 70):
        x, chosen = random(rows, WIDTH, seed=9), choices("random", rows)
        gates, valid = jnp.ones(chosen.shape), jnp.zeros(rows, bool)
        assert not run_experts(x, chosen, gates, valid, weights).any()


ROWS, BLOCK, WIDE = 13, 4, 16


@jax.jit
def placed(chosen: jax.Array, valid: jax.Array) -> Any:
    """Of both placements: size of a block, (row, slot, expert)."""
    both = (blocks_sorted, BLOCK), (blocks_in_place, WIDE)
    blocks = [(size, place(chosen, valid, EXPERTS, size)) for place, size in both]
    return [(size, (found.row, found.slot, found.expert)) for size, found in blocks]


@given(st.lists(st.integers(0, EXPERTS - 1), min_size=ROWS, max_size=ROWS), st.integers(0, 2**32))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_blocks_hold_each_pair_once(first: list[int], seed: int) -> None:
    """Sorted or in place: a pair's slot is in a block of its expert, and holds its row."""
    rng = np.random.default_rng(seed)
    second = (np.array(first) + rng.integers(1, EXPERTS, ROWS)) % EXPERTS
    chosen = np.stack([first, second], axis=1).astype(np.int32)
    valid = rng.uniform(size=ROWS) < 0.8
    real = np.flatnonzero(valid)
    for size, arrays in placed(chosen, valid):
        row, slot, expert = map(np.asarray, arrays)
        assert sorted(row[row >= 0]) == sorted(np.repeat(real, SELECTED))
        assert (row[slot[valid]] == real[:, None]).all()
        assert (expert[slot[valid] // size] == chosen[valid]).all()
        assert len(set(slot[valid].ravel())) == real.size * SELECTED


@pytest.mark.parametrize(("rows", "depth", "dtype"), [(5, 2048, "float32"), (130, 96, "bfloat16")])
def test_products_of_several_weights_in_one_launch(rows: int, depth: int, dtype: str) -> None:
    """Few rows: the sum over the depth is split; groups of scales lie within and across parts."""
    groups_of_columns = {64: 1, 16: 2, 96: 4 if depth > 100 else 3}
    weights = [
        weight(LAYERS, depth, columns, groups=groups, seed=columns)
        for columns, groups in groups_of_columns.items()
    ]
    x = random(rows, depth, seed=1).astype(dtype)
    found = run_products(x, weights)
    for one, w in zip(found, weights, strict=True):
        assert one.dtype == jnp.float32
        close(one, matmul(x, LayerSlice(w, LAYER)), dtype)


@jax.jit
def by_both(
    queries: jax.Array, pool: KVPool, table: jax.Array, starts: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By the kernel, and in JAX; and which tokens are real."""
    positions = starts[:, None] + jnp.arange(queries.shape[1], dtype=jnp.int32)
    context = PagedContext(table, positions, lengths)
    found = attention(
        queries,
        pool.keys,
        pool.values,
        LAYER,
        context.block_table,
        context.positions,
        context.lengths,
        multiplier=CONFIG.attn_output_multiplier,
        cap=CONFIG.attn_logit_cap,
    )
    return found, attend_pages(queries, pool, LAYER, context, CONFIG), context.valid


def integers(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "page_size", "width", "starts", "lengths", "dtype"),
    [
        # Decode: the context in several spans; a row that is not real, one at the first position.
        (1, 6, 1, 4, 200, [799, 3, 0, 0], [1, 1, 0, 1], "float32"),
        (1, 12, 2, 64, 16, [1023, 300, 64, 63], [1, 1, 1, 1], "bfloat16"),
        # Prefill chunks, not at the start of a page, of uneven lengths.
        (40, 6, 2, 12, 30, [100, 0, 7, 0], [40, 13, 1, 0], "float32"),
        (50, 6, 1, 64, 16, [700, 0, 0, 0], [41, 50, 0, 0], "bfloat16"),
    ],
)
def test_attention(
    tokens: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    width: int,
    starts: list[int],
    lengths: list[int],
    dtype: str,
) -> None:
    rows, size = len(starts), 32
    shape = (LAYERS, rows * width, page_size, kv_heads, size)
    keys, values = (2 * random(*shape, seed=seed).astype(dtype) for seed in (1, 2))
    table = np.random.default_rng(3).permutation(rows * width).reshape(rows, width)
    queries = 2 * random(rows, tokens, heads, size, seed=4).astype(dtype)
    found, expected, real = by_both(
        queries,
        KVPool(keys, values),
        jnp.asarray(table, jnp.int32),
        integers(*starts),
        integers(*lengths),
    )
    assert found.dtype == queries.dtype
    close(found[real], expected[real], dtype)
    assert not found[~real].any()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """To the bit, as the seeds of requests promise."""
    table = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    pool = KVPool(*(random(LAYERS, 32, 64, 1, 16, seed=seed) for seed in (1, 2)))
    queries = random(2, 1, 6, 16, seed=3)
    alone, _, _ = by_both(queries, pool, table, integers(300, 0), integers(1, 0))
    beside, _, _ = by_both(queries, pool, table, integers(300, 1023), integers(1, 1))
    assert (alone[0] == beside[0]).all()


def shapes(*arrays: tuple[tuple[int, ...], Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]


def released_stack(*shape: int) -> list[jax.ShapeDtypeStruct]:
    """A shard's part of a stack of the released model, and its scales."""
    return shapes(((64, *shape), jnp.int8), ((64, *shape[:-2], 1, shape[-1]), jnp.bfloat16))


def released_experts(rows: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    def run(x: Any, chosen: Any, gates: Any, valid: Any, layer: Any, *weights: Any) -> Any:
        stacks = [Stack(*weights[i : i + 2], layer) for i in (0, 2, 4)]
        assert takes(stacks)
        return experts(x, chosen, gates, valid, *stacks)

    weights = [*released_stack(8, 6144, 4096) * 2, *released_stack(8, 4096, 6144)]
    pairs = ((rows, 2), jnp.int32), ((rows, 2), jnp.float32)
    rest = shapes(((rows, 6144), jnp.bfloat16), *pairs, ((rows,), jnp.bool_), ((), jnp.int32))
    return run, [*rest, *weights]


def released_products(rows: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    def run(x: Any, layer: Any, *weights: Any) -> Any:
        stacks = [Stack(*weights[i : i + 2], layer) for i in (0, 2, 4)]
        assert takes(stacks)
        return products(x, stacks)

    weights = [part for columns in (768, 128, 128) for part in released_stack(6144, columns)]
    return run, [*shapes(((rows, 6144), jnp.bfloat16), ((), jnp.int32)), *weights]


def released_attention(
    rows: int, tokens: int
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    run = functools.partial(attention, multiplier=0.088, cap=30.0)
    pages = ((64, 1024, 64, 1, 128), jnp.bfloat16)
    queries = ((rows, tokens, 6, 128), jnp.bfloat16)
    table = ((rows, 128), jnp.int32), ((rows, tokens), jnp.int32), ((rows,), jnp.int32)
    return run, shapes(queries, pages, pages, ((), jnp.int32), *table)


@pytest.mark.usefixtures("gpu_is_meant")
@pytest.mark.parametrize(
    ("make", "launches"),
    [
        (functools.partial(released_experts, 1), 2),
        (functools.partial(released_experts, 32), 2),
        (functools.partial(released_experts, 2048), 2),
        (functools.partial(released_products, 32), 1),
        (functools.partial(released_products, 2048), 1),
        (functools.partial(released_attention, 32, 1), 2),
        (functools.partial(released_attention, 1, 2048), 2),
    ],
)
def test_the_released_sizes_lower_for_cuda(
    make: Callable[..., Any], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 8 shards, at every step's rows; launches are those of the kernels."""
    monkeypatch.setattr(launch, "INTERPRET", False)
    run, arguments = make()
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == launches


@pytest.fixture
def gpu_is_meant() -> Iterator[None]:
    with gpus_meant(1):
        yield


def test_what_the_kernels_cannot_take_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "on_gpu", lambda: True)

    def chosen(shape: tuple[int, ...], dtype: Any = jnp.int8) -> Any:
        array: Any = jax.ShapeDtypeStruct(shape, dtype)
        return choice.for_weights(jnp.bfloat16, [Stack(array, None, LAYER)])

    assert chosen((2, 64, 32)) is not None
    assert chosen((2, 64, 24)) is None  # columns that no tile divides
    assert chosen((2, 24, 32)) is None
    # Between 2 and 4 GiB of int8, Pallas' offsets of 32 bits would be negative.
    assert chosen((3, 2**15, 2**15)) is None
    assert chosen((5, 2**15, 2**15)) is not None
    assert chosen((3, 2**14, 2**14), jnp.float32) is not None

    def attends(size: int, dtype: Any) -> bool:
        queries: Any = jax.ShapeDtypeStruct((1, 1, 4, size), jnp.bfloat16)
        pages: Any = jax.ShapeDtypeStruct((2, 3, 4, 1, size), dtype)
        return choice.for_attention(queries, pages) is not None

    assert attends(16, jnp.bfloat16)
    assert not attends(24, jnp.bfloat16)
    assert not attends(16, jnp.float32)
