"""Muon for the weight matrices, Adam for the rest.

Muon (K. Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks") replaces a
matrix's momentum by the nearest orthogonal matrix, found by Newton-Schulz iterations; it needs
clearly fewer tokens than AdamW for the same loss, and tokens are what two cores lack.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from training.objective import Params

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAM_BETAS = (0.9, 0.98)
ADAM_EPSILON = 1e-8


class OptimizerState(NamedTuple):
    """First and second moments; Muon's matrices have the first alone (the second stays 0)."""

    step: jax.Array  # [] int32
    first: Params
    second: Params


def init_state(params: Params) -> OptimizerState:
    def second(path: tuple[jax.tree_util.DictKey, ...], param: jax.Array) -> jax.Array:
        return jnp.zeros(() if uses_muon(path) else param.shape, param.dtype)

    return OptimizerState(
        step=jnp.zeros((), jnp.int32),
        first=jax.tree.map(jnp.zeros_like, params),
        second=jax.tree_util.tree_map_with_path(second, params),
    )


def uses_muon(path: tuple[jax.tree_util.DictKey, ...]) -> bool:
    """Attention and expert matrices; the router, the embedding and the norms use Adam."""
    module, name = path[0].key, path[1].key
    return bool(name == "w" and not module.endswith("router"))


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """The orthogonal factor of each matrix, roughly (singular values in about 0.7 to 1.2).

    [..., rows, columns] -> the same shape.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    wide = matrix.shape[-1] >= matrix.shape[-2]
    x = matrix if wide else jnp.swapaxes(matrix, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else jnp.swapaxes(x, -1, -2)


def update(
    params: Params,
    grads: Params,
    state: OptimizerState,
    muon_rate: jax.Array,
    adam_rate: jax.Array,
    weight_decay: float,
    shares: NamedSharding | None = None,
) -> tuple[Params, OptimizerState]:
    """One step; weight decay is decoupled, on Muon's matrices only.

    `shares` splits the leading axis of stacks of matrices: each device orthogonalises some.
    """
    step = state.step + 1
    beta1, beta2 = ADAM_BETAS

    def muon(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m = MOMENTUM * m + g
        rows, columns = p.shape[-2:]
        # The scale that gives every shape an update of the same root mean square per output.
        scale = max(1.0, columns / rows) ** 0.5
        target = g + MOMENTUM * m
        if shares is not None and target.ndim == 3:
            target = jax.lax.with_sharding_constraint(target, shares)
        direction = orthogonalize(target) * scale
        return p * (1 - muon_rate * weight_decay) - muon_rate * direction, m, v

    def adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * jnp.square(g)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        return p - adam_rate * m_hat / (jnp.sqrt(v_hat) + ADAM_EPSILON), m, v

    def one(path: tuple[jax.tree_util.DictKey, ...], *leaves: jax.Array) -> tuple[jax.Array, ...]:
        return (muon if uses_muon(path) else adam)(*leaves)

    moved = jax.tree_util.tree_map_with_path(one, params, grads, state.first, state.second)
    new_params, first, second = jax.tree.transpose(
        jax.tree.structure(params), jax.tree.structure((0, 0, 0)), moved
    )
    return new_params, OptimizerState(step, first, second)
