"""Attention over pages is causal attention, wherever the pages lie and however a prompt is cut."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.kernels import native
from grok1_backend.model import attention
from grok1_backend.model.attention import (
    KVPool,
    PagedContext,
    attend_causal,
    attend_pages,
    write_pages,
)
from grok1_backend.model.config import load_config

CONFIG = dataclasses.replace(load_config("tiny"), attn_logit_cap=3.0)
PAGE, PAGES, WIDTH, LAYERS, LAYER = 4, 24, 6, 2, 1
ROWS, CHUNK = 3, 8
HEADS, KV_HEADS, SIZE = CONFIG.num_q_heads, CONFIG.num_kv_heads, CONFIG.key_size
Array = np.ndarray[Any, Any]


def reference(q: Array, k: Array, v: Array) -> Array:
    """Causal attention [B, T, H, D] as in the formula, in float64."""
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=2) for part in (k, v))
    cap, length = CONFIG.attn_logit_cap, q.shape[1]
    scores = np.einsum("bthd,bchd->bhtc", q, k, dtype=np.float64) * CONFIG.attn_output_multiplier
    scores = np.where(np.tri(length, dtype=bool), cap * np.tanh(scores / cap), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhtc,bchd->bthd", weights, v)


def chunk_step(pool: KVPool, q: Any, k: Any, v: Any, table: Any, starts: Any, lengths: Any) -> Any:
    positions = starts[:, None] + jnp.arange(CHUNK)
    context = PagedContext(table, positions, lengths)
    pool = write_pages(pool, jnp.int32(LAYER), k, v, context)
    return attend_pages(q, pool, jnp.int32(LAYER), context, CONFIG), pool


@pytest.fixture(scope="module")
def step(backend: str) -> Any:
    """The step of both implementations, in JAX with blocks of two pages."""
    assert native.available(jnp.float32) == (backend == "native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_POSITIONS", 2 * PAGE)
        yield jax.jit(chunk_step)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, derandomize=True, deadline=None)
def check(step: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.integers(1, PAGE * WIDTH + 1, ROWS)
    length = int(totals.max())
    q, k, v = (
        rng.normal(size=(ROWS, length, heads, SIZE)).astype(np.float32) * 2
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    expected = reference(q, k, v)
    # A page out of bounds would be read as NaN's neighbour: all pages start with rubbish.
    rubbish = rng.normal(size=(LAYERS, PAGES, PAGE, KV_HEADS, SIZE)).astype(np.float32) * 50
    pool = KVPool(jnp.asarray(rubbish), jnp.asarray(rubbish))
    table = rng.permutation(PAGES)[: ROWS * WIDTH].reshape(ROWS, WIDTH).astype(np.int32)
    done = np.zeros(ROWS, np.int32)
    while (done < totals).any():
        lengths = np.minimum(rng.integers(0, CHUNK + 1, ROWS), totals - done).astype(np.int32)
        parts = [np.zeros((ROWS, CHUNK, *whole.shape[2:]), np.float32) for whole in (q, k, v)]
        for part, whole in zip(parts, (q, k, v), strict=True):
            for row in range(ROWS):
                part[row, : lengths[row]] = whole[row, done[row] : done[row] + lengths[row]]
        out, pool = step(pool, *parts, table, done, lengths)
        for row in range(ROWS):
            here = slice(done[row], done[row] + lengths[row])
            np.testing.assert_allclose(
                out[row, : lengths[row]], expected[row, here], rtol=2e-5, atol=2e-5
            )
        done = done + lengths
    # Nothing is written to another layer, to pages that no row owns, or past a row's end.
    stored = np.asarray(pool.keys)
    np.testing.assert_array_equal(stored[1 - LAYER], rubbish[1 - LAYER])
    free = np.setdiff1d(np.arange(PAGES), table)
    np.testing.assert_array_equal(stored[LAYER, free], rubbish[LAYER, free])
    for row, total in enumerate(totals):
        np.testing.assert_array_equal(
            stored[LAYER, table[row]].reshape(-1, KV_HEADS, SIZE)[total:],
            rubbish[LAYER, table[row]].reshape(-1, KV_HEADS, SIZE)[total:],
        )


def test_pages_in_any_order_and_prompts_cut_anywhere(step: Any) -> None:
    check(step)


def test_attention_without_pages() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(2, 11, heads, SIZE)).astype(np.float32) * 2
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    found = jax.jit(functools.partial(attend_causal, config=CONFIG))(q, k, v)
    np.testing.assert_allclose(found, reference(q, k, v), rtol=2e-5, atol=2e-5)
