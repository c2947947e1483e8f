"""The differentiable experts against the served ones, the losses, and a training step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.objective import balance_loss, capacity_experts, init_params, make_loss
from training.optimizer import init_state, orthogonalize, update

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.moe import ExpertWeights, Routing, chosen_experts

CONFIG = GrokConfig(
    vocab_size=32,
    sequence_len=32,
    emb_size=16,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    key_size=8,
    widening_factor=1.5,
    num_experts=4,
    num_selected_experts=2,
    embedding_multiplier_scale=4.0,
    output_multiplier_scale=1.0,
    attn_output_multiplier=0.35,
)


def _inputs(experts: list[list[int]]) -> tuple[jax.Array, Routing, ExpertWeights, jax.Array]:
    rows = len(experts)
    keys = jax.random.split(jax.random.key(0), 5)
    routing = Routing(
        probabilities=jnp.full((rows, 4), 0.25),
        experts=jnp.array(experts, jnp.int32),
        gates=jax.random.uniform(keys[0], (rows, 2)),
    )
    weights = ExpertWeights(
        linear=jax.random.normal(keys[1], (4, 8, 16)),
        linear_v=jax.random.normal(keys[2], (4, 8, 16)),
        linear_1=jax.random.normal(keys[3], (4, 16, 8)),
    )
    return jax.random.normal(keys[4], (rows, 8)), routing, weights, jnp.ones(rows, bool)


def test_capacity_experts_equal_the_served_ones() -> None:
    inputs = _inputs([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2], [1, 3], [2, 0], [3, 1]])
    np.testing.assert_allclose(capacity_experts(*inputs), chosen_experts(*inputs), rtol=1e-5)


def test_a_full_expert_takes_its_first_rows_only() -> None:
    x, routing, weights, valid = _inputs([[0, 1]] * 8)  # 16 pairs: a capacity of 5
    out = capacity_experts(x, routing, weights, valid)
    expected = chosen_experts(x, routing, weights, valid)
    np.testing.assert_allclose(out[:5], expected[:5], rtol=1e-5)
    assert np.all(np.asarray(out[5:]) == 0)


def test_balance_loss_is_least_when_experts_are_used_evenly() -> None:
    even = Routing(jnp.full((4, 4), 0.25), jnp.array([[0, 1], [2, 3], [1, 2], [3, 0]]), jnp.ones(2))
    one = Routing(jnp.eye(4)[:1].repeat(4, 0), jnp.zeros((4, 2), jnp.int32), jnp.ones(2))
    assert float(balance_loss(even)) == pytest.approx(1)
    assert float(balance_loss(one)) == pytest.approx(4)


@pytest.mark.parametrize("shape", [(3, 24, 24), (24, 8), (8, 24)])
def test_orthogonalize(shape: tuple[int, ...]) -> None:
    matrix = jax.random.normal(jax.random.key(1), shape)
    singular = jnp.linalg.svd(orthogonalize(matrix), compute_uv=False)
    assert float(jnp.max(singular)) < 1.3
    assert float(jnp.median(singular)) > 0.6


def test_two_steps_learn_a_batch() -> None:
    tokens = jnp.tile(jnp.arange(1, 18, dtype=jnp.int32), (2, 1))
    params, loss = init_params(CONFIG, 0), jax.jit(make_loss(CONFIG))
    gradient, step = jax.jit(jax.grad(make_loss(CONFIG), has_aux=True)), jax.jit(update)
    state, before = init_state(params), loss(params, tokens)[1]
    for _ in range(2):
        grads, _ = gradient(params, tokens)
        moved = jax.tree.map(lambda g: bool(jnp.any(g != 0)), grads)
        assert all(jax.tree.leaves(moved)), moved
        params, state = step(params, grads, state, 0.02, 0.01, 0.0)
    assert int(state.step) == 2
    assert float(loss(params, tokens)[1]) < float(before) - 0.1
