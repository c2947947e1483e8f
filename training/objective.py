"""The loss of the embedded model: the package's own modules, with experts that have a gradient."""

from __future__ import annotations

import math
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.moe import ExpertWeights, Routing, expert
from grok1_backend.model.quantization import QuantizedWeight8bit
from grok1_backend.model.transformer import forward

Params = dict[str, dict[str, jax.Array]]  # Haiku's: module path -> parameter name -> array
StoredParams = dict[str, dict[str, jax.Array | QuantizedWeight8bit]]  # as in the checkpoint

CAPACITY_FACTOR = 1.25
"""Rows an expert can take in training, over the mean. The balance loss keeps overflow rare."""
BALANCE_WEIGHT = 0.01
EMBEDDING_DEVIATION = 0.02


def capacity_experts(
    x: jax.Array, routing: Routing, weights: ExpertWeights, valid: jax.Array
) -> jax.Array:
    """The chosen experts of each row, in fixed shapes: each expert takes its first rows only.

    Rows beyond an expert's capacity go without it (in training alone; serving drops nothing).
    Arguments and result as `grok1_backend.model.moe.Experts`; all rows must be valid.
    """
    del valid
    rows, selected = routing.experts.shape
    num_experts = routing.probabilities.shape[1]
    capacity = math.ceil(CAPACITY_FACTOR * rows * selected / num_experts)

    chosen = routing.experts.reshape(-1)  # [pairs]
    one_hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
    turn = jnp.sum(jnp.cumsum(one_hot, axis=0) * one_hot, axis=1) - 1  # place in the expert's queue
    slot = jnp.where(turn < capacity, chosen * capacity + turn, num_experts * capacity)

    pair_row = jnp.arange(rows * selected) // selected
    # An empty slot reads the row of zeros after the last; an overflowing pair, the last slot's 0.
    slot_row = jnp.full(num_experts * capacity, rows).at[slot].set(pair_row, mode="drop")
    gathered = jnp.pad(x, ((0, 1), (0, 0)))[slot_row].reshape(num_experts, capacity, -1)

    def one(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        rows_of_one, *matrices = inputs
        return None, expert(rows_of_one, ExpertWeights(*matrices), jnp.int32(0))

    # `expert` indexes a stack of experts: here a stack of one, so that the gradient is no larger.
    stacked = [
        jnp.asarray(w)[:, None] for w in (weights.linear, weights.linear_v, weights.linear_1)
    ]
    _, outputs = jax.lax.scan(one, None, (gathered, *stacked))
    outputs = jnp.pad(outputs.reshape(num_experts * capacity, -1), ((0, 1), (0, 0)))
    return jnp.einsum("rsd,rs->rd", outputs[slot].reshape(rows, selected, -1), routing.gates)


def balance_loss(routing: Routing) -> jax.Array:
    """1 when the experts are used evenly, up to their number when not (arXiv:2101.03961)."""
    num_experts = routing.probabilities.shape[1]
    share = jnp.mean(jax.nn.one_hot(routing.experts, num_experts), axis=(0, 1))
    return num_experts * jnp.sum(share * jnp.mean(routing.probabilities, axis=0))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-ln P of each target: [..., vocab] and [...] int32 -> [...]."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def make_loss(config: GrokConfig) -> Any:
    """The training loss (params, tokens [batch, length + 1]) -> (loss, cross-entropy), in nats."""
    model = hk.transform(lambda tokens: forward(tokens, config, experts=capacity_experts))

    def loss(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, routings = model.apply(params, None, tokens[:, :-1])
        nats = jnp.mean(cross_entropy(logits, tokens[:, 1:]))
        balance = sum(balance_loss(routing) for routing in routings) / len(routings)
        return nats + BALANCE_WEIGHT * balance, nats

    return loss


def init_params(config: GrokConfig, seed: int) -> Params:
    """Haiku's initial parameters, with norm scales and embeddings set for training from scratch.

    The norms after attention and experts start small, so that the residual stream of the whole
    stack starts near the embeddings. The table also makes the logits, where an embedding must not
    start out predicting its own token: hence its small deviation.
    """
    model = hk.transform(lambda tokens: forward(tokens, config))
    params: Params = model.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))
    branch_scale = 1 / math.sqrt(2 * config.num_layers)
    for path, module in params.items():
        if "scale" in module:
            after = path.endswith(("rms_norm_1", "rms_norm_3"))
            module["scale"] = jnp.full_like(module["scale"], branch_scale if after else 1.0)
        if "embeddings" in module:
            module["embeddings"] = module["embeddings"] * EMBEDDING_DEVIATION
    return params
