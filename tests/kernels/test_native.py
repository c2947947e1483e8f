"""The native kernels against the same computation in JAX or NumPy."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from grok1_backend.kernels import native
from grok1_backend.model.attention import KVPool, PagedContext, attend_pages
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.moe import ExpertWeights, Routing, chosen_experts
from grok1_backend.model.quantization import (
    LayerSlice,
    QuantizedWeight8bit,
    Weight,
    products,
    quantize,
)

Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(
    not native.available(jnp.float32), reason="no C++ compiler and no built library"
)

LAYERS, EXPERTS, WIDTH, FFN = 2, 8, 64, 88
LAYER = jnp.int32(1)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def layer_of(shape: tuple[int, ...], groups: int, seed: int) -> LayerSlice:
    """A stack of random weights; 0 groups: float32, else int8 with so many groups of scales."""
    weight = jnp.asarray(random(*shape, seed=seed) * 0.3)
    return LayerSlice(quantize(weight, groups) if groups else weight, LAYER)


def expert_weights(groups: int) -> ExpertWeights:
    return ExpertWeights(
        layer_of((LAYERS, EXPERTS, WIDTH, FFN), groups, 1),
        layer_of((LAYERS, EXPERTS, WIDTH, FFN), groups, 2),
        layer_of((LAYERS, EXPERTS, FFN, WIDTH), groups, 3),
    )


def routing_of(rows: int, favourite: float = 0.0) -> Routing:
    """Random choices of 2; a large `favourite` sends every row to expert 2 and none to expert 5."""
    lean = favourite * (np.arange(EXPERTS) == 2) - favourite * (np.arange(EXPERTS) == 5)
    probabilities = jax.nn.softmax(jnp.asarray(random(rows, EXPERTS, seed=4) * 2 + lean))
    gates, experts = jax.lax.top_k(probabilities, 2)
    return Routing(probabilities, experts, gates)


def dense(weight: Weight) -> NDArray[np.float64]:
    """The chosen layer of a stack as floats."""
    assert isinstance(weight, LayerSlice)
    if not isinstance(weight.stack, QuantizedWeight8bit):
        return np.asarray(weight.stack, np.float64)[LAYER]
    matrix = np.asarray(weight.stack.weight, np.float64)[LAYER]
    scales = np.asarray(weight.stack.scales, np.float64)[LAYER]
    return matrix * np.repeat(scales, matrix.shape[-2] // scales.shape[-2], axis=-2)


def dense_experts(x: Floats, routing: Routing, weights: ExpertWeights) -> NDArray[np.float64]:
    """Every expert of every row in float64, weighted by the gates of those that are chosen."""
    gate = np.einsum("rk,ekf->ref", x, dense(weights.linear))
    gate *= (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    up = np.einsum("rk,ekf->ref", x, dense(weights.linear_v))
    outputs = np.einsum("ref,efk->rek", gate * up, dense(weights.linear_1))
    share = np.zeros(outputs.shape[:2])
    np.put_along_axis(share, np.asarray(routing.experts), np.asarray(routing.gates), axis=1)
    return np.einsum("re,rek->rk", share, outputs)


@pytest.mark.parametrize("groups", [0, 1, 8])
@pytest.mark.parametrize("rows", [1, 3, 13, 300])
def test_experts_equal_a_dense_computation(groups: int, rows: int) -> None:
    x = random(rows, WIDTH)
    valid = np.random.default_rng(5).random(rows) < 0.8
    valid[0] = True
    weights = expert_weights(groups)
    for routing in (routing_of(rows), routing_of(rows, favourite=50.0)):
        ours = chosen_experts(jnp.asarray(x), routing, weights, jnp.asarray(valid))
        reference = np.where(valid[:, None], dense_experts(x, routing, weights), 0)
        np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6 * abs(reference).max())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """To the bit: whoever shares its experts, however many they are, and invalid ones."""
    rows = 40
    weights = expert_weights(1)

    @jax.jit
    def compute(x: jax.Array, experts: jax.Array, valid: jax.Array) -> jax.Array:
        gates = jnp.full(experts.shape, 0.4, jnp.float32)
        routing = Routing(jnp.zeros((rows, EXPERTS)), experts, gates)
        return chosen_experts(x, routing, weights, valid)

    x, everyone = random(rows, WIDTH), np.ones(rows, bool)
    experts = np.asarray(routing_of(rows).experts)
    before = compute(x, experts, everyone)[3]
    crowded = np.broadcast_to(experts[3], experts.shape)
    alone = np.arange(rows) == 3
    others = np.where(alone[:, None], x, random(rows, WIDTH, seed=9))
    np.testing.assert_array_equal(before, compute(others, crowded, everyone)[3])
    np.testing.assert_array_equal(before, compute(others, experts, alone)[3])


def test_only_chosen_experts_are_computed_and_each_is_read_once() -> None:
    rows = 64
    routing = routing_of(rows, favourite=50.0)
    valid = jnp.arange(rows) < 50
    before = native.counters()
    jax.block_until_ready(
        chosen_experts(jnp.ones((rows, WIDTH)), routing, expert_weights(1), valid)
    )
    computed, read = np.subtract(native.counters(), before)
    touched = np.unique(routing.experts[:50]).size
    assert 2 < touched < EXPERTS
    assert computed == 2 * 50
    assert read == touched * 3 * WIDTH * FFN


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("rows", [*range(1, 14), 500])
def test_products_equal_numpy(groups: int, rows: int) -> None:
    """Several at once; columns that fill no vector, one vector, and many strips."""
    x = random(rows, WIDTH)
    weights = [layer_of((LAYERS, WIDTH, n), groups, n) for n in (1, 16, 50, 777)]
    for ours, weight in zip(products(jnp.asarray(x), weights), weights, strict=True):
        np.testing.assert_allclose(ours, x @ dense(weight), rtol=0, atol=1e-5)


CONFIG = GrokConfig(
    vocab_size=64,
    sequence_len=512,
    emb_size=64,
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    key_size=16,
    widening_factor=2.0,
    num_experts=8,
    num_selected_experts=2,
    embedding_multiplier_scale=1.0,
    output_multiplier_scale=1.0,
    attn_output_multiplier=0.5,
)


@dataclasses.dataclass(frozen=True)
class Paged:
    """Random queries over random pages."""

    queries: jax.Array
    pool: KVPool
    context: PagedContext

    @classmethod
    def of(cls, page_size: int, size: int, starts: list[int], lengths: list[int]) -> Paged:
        batch, tokens = len(starts), max(lengths)
        width = -(-(max(starts) + tokens) // page_size)
        pages = width * batch + 3
        rng = np.random.default_rng(7)
        table = rng.permutation(pages)[: width * batch].reshape(batch, width).astype(np.int32)
        positions = np.array(starts, np.int32)[:, None] + np.arange(tokens, dtype=np.int32)
        shape = (LAYERS, pages, page_size, CONFIG.num_kv_heads, size)
        return cls(
            jnp.asarray(3 * random(batch, tokens, CONFIG.num_q_heads, size)),
            KVPool(jnp.asarray(random(*shape, seed=1)), jnp.asarray(random(*shape, seed=2))),
            PagedContext(jnp.asarray(table), jnp.asarray(positions), jnp.asarray(lengths)),
        )

    def attend(self) -> jax.Array:
        return attend_pages(self.queries, self.pool, LAYER, self.context, CONFIG)


@pytest.mark.parametrize(
    "paged",
    [
        Paged.of(8, 16, starts=[0, 3, 127, 128, 300], lengths=[1] * 5),
        Paged.of(8, 16, starts=[0, 130], lengths=[40, 25]),
        Paged.of(64, 64, starts=[260], lengths=[150]),
        Paged.of(16, 40, starts=[0, 200, 9], lengths=[50, 17, 1]),
    ],
)
def test_attention_equals_jax(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = paged.attend()
    monkeypatch.setattr(native, "available", lambda _: False)
    reference = paged.attend()
    valid = np.asarray(paged.context.valid)
    np.testing.assert_allclose(ours[valid], reference[valid], rtol=0, atol=1e-5)
    assert not np.any(ours[~valid])


def test_attention_sees_its_own_context_only() -> None:
    """To the bit: not the neighbours' lengths, nor what lies in pages beyond a row's context."""
    paged = Paged.of(8, 16, starts=[77, 300], lengths=[1, 1])
    before = paged.attend()[0]
    seen = paged.context.block_table[0, : 78 // 8 + 1]
    foreign = jnp.ones(paged.pool.keys.shape[1], bool).at[seen].set(False)
    pool = jax.tree.map(
        lambda pages: jnp.where(foreign[:, None, None, None], jnp.nan, pages), paged.pool
    )
    # The rest of the last page was never written by this row: 78 positions are.
    pool = jax.tree.map(lambda pages: pages.at[:, seen[-1], 78 % 8 :].set(jnp.nan), pool)
    neighbour = dataclasses.replace(paged.context, positions=paged.context.positions.at[1].set(0))
    after = dataclasses.replace(paged, pool=pool, context=neighbour).attend()[0]
    np.testing.assert_array_equal(before, after)


def test_positions_and_pages_out_of_range_do_no_harm() -> None:
    """A token that overruns the context sees all of it; a wild page number stays in the pool."""
    paged = Paged.of(8, 16, starts=[20], lengths=[1])
    wild = dataclasses.replace(
        paged.context,
        positions=jnp.full((1, 1), 10**6, jnp.int32),
        block_table=paged.context.block_table.at[0, 0].set(-5).at[0, 1].set(10**6),
    )
    assert np.all(np.isfinite(dataclasses.replace(paged, context=wild).attend()))


def stack(*shape: int, layer: int = 0) -> native.Stack:
    return native.Stack(jnp.zeros(shape), None, jnp.int32(layer))


@pytest.mark.parametrize(
    "weights",
    [
        stack(2, 4, 8, layer=2),
        stack(2, 4, 8, layer=-1),
        stack(2, 5, 8),
        stack(4, 8),
        native.Stack(jnp.zeros((2, 4, 8), jnp.int16), None, jnp.int32(0)),
        native.Stack(jnp.zeros((2, 4, 8), jnp.int8), jnp.zeros((2, 3, 8)), jnp.int32(0)),
        native.Stack(jnp.zeros((2, 4, 8), jnp.int8), jnp.zeros((2, 1, 7)), jnp.int32(0)),
        native.Stack(jnp.zeros((2, 4, 8), jnp.int8), None, jnp.int32(0)),
    ],
)
def test_wrong_arguments_are_errors(weights: native.Stack) -> None:
    with pytest.raises(Exception, match="native kernel: not so"):
        jax.block_until_ready(native.products(jnp.zeros((1, 4)), [weights]))


def test_an_expert_that_does_not_exist_is_not_computed() -> None:
    weights = expert_weights(1)
    experts = jnp.array([[EXPERTS, -1]])
    routing = Routing(jnp.zeros((1, EXPERTS)), experts, jnp.ones((1, 2)))
    assert not np.any(chosen_experts(jnp.ones((1, WIDTH)), routing, weights, jnp.ones(1, bool)))


def test_weights_are_read_in_place() -> None:
    """A step in a scan over layers needs no copy of any weight: temporaries are those of rows."""
    weights = expert_weights(1)
    stacks = [w.stack for w in (weights.linear, weights.linear_v, weights.linear_1)]

    def run(x: jax.Array, stacks: list[QuantizedWeight8bit]) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            slices = ExpertWeights(*(LayerSlice(stack, layer) for stack in stacks))
            return chosen_experts(x, routing_of(4), slices, jnp.ones(4, bool)), None

        return jax.lax.scan(body, x, jnp.arange(LAYERS))[0]

    compiled = jax.jit(run).lower(jnp.ones((4, WIDTH)), stacks).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * (2 * 4 * (WIDTH + FFN))


PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np
from grok1_backend.kernels import native
assert native.available(jnp.float32)
rng = np.random.default_rng(0)
layer = jnp.int32(0)
def stack(*shape):
    weight = jnp.asarray(rng.integers(-127, 128, shape, np.int8))
    return native.Stack(weight, jnp.full((*shape[:-2], 1, shape[-1]), 0.002), layer)
x = jnp.asarray(rng.standard_normal((20, 64), np.float32))
experts = jnp.asarray(rng.integers(0, 4, (20, 2), np.int32))
stacks = stack(1, 4, 64, 88), stack(1, 4, 64, 88), stack(1, 4, 88, 64)
mixed = native.experts(x, experts, jnp.ones((20, 2)), jnp.ones(20, bool), *stacks)
logits = native.table_product(x, rng.standard_normal((99, 64), np.float32), None)
quantized = jnp.asarray(rng.integers(-127, 128, (99, 64), np.int8))
rounded = native.table_product(x, quantized, jnp.full(99, 0.002))
keys, values = (jnp.asarray(rng.standard_normal((1, 9, 8, 2, 16), np.float32)) for _ in range(2))
queries = jnp.asarray(rng.standard_normal((1, 20, 8, 16), np.float32))
table = jnp.arange(9, dtype=jnp.int32)[None]
positions = 40 + jnp.arange(20, dtype=jnp.int32)[None]
lengths = jnp.array([20], jnp.int32)
attended = native.attention(
    queries, keys, values, layer, table, positions, lengths, multiplier=0.3, cap=30.0
)
print(json.dumps([np.asarray(a).ravel().tolist() for a in (mixed, logits, rounded, attended)]))
"""


def results_with(instructions: str) -> list[Floats]:
    environment = {**os.environ, native.SWITCH: instructions}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [np.array(values, np.float32) for values in json.loads(done.stdout)]


@pytest.mark.parametrize("instructions", ["base", "avx2"])
def test_every_instruction_set_computes_the_same(instructions: str) -> None:
    for ours, best in zip(results_with(instructions), results_with(""), strict=True):
        np.testing.assert_allclose(ours, best, rtol=0, atol=2e-6 * abs(best).max())


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler"),
        ({"CXX": "false"}, "the C++ compiler failed"),
        ({native.SWITCH: "0"}, "left out"),
    ],
)
def test_without_kernels_there_is_one_line_in_the_log(
    environment: dict[str, str], line: str, tmp_path: Path
) -> None:
    program = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from grok1_backend.kernels import native\n"
        "assert not native.available('float32') and not native.available('float32')\n"
    )
    ours = {native.SWITCH: "", "XDG_CACHE_HOME": str(tmp_path), **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={**os.environ, **ours}, capture_output=True, text=True, check=True
    )
    lines = [text for text in done.stderr.splitlines() if text.startswith("native kernels")]
    assert len(lines) == 1
    assert line in lines[0]


def test_other_activations_are_left_to_jax() -> None:
    assert not native.available(jnp.bfloat16)
