"""The mixture of experts: router, gated expert, and the grouped computation of chosen experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.precision import product_precision
from grok1_backend.model.quantization import Weight, kernels_and_stacks, matmul, value
from grok1_backend.model.sharding import ModelShards

BLOCK_ROWS = 64
"""The most rows that one expert computes at a time."""


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The three matrices of all experts of one layer (this shard's part of their width)."""

    linear: Weight  # [experts, emb_size, ffn_size]: the gate
    linear_v: Weight  # [experts, emb_size, ffn_size]: what it gates
    linear_1: Weight  # [experts, ffn_size, emb_size]


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts each row uses."""

    probabilities: jax.Array  # [rows, experts] float32
    experts: jax.Array  # [rows, selected] int32, the most probable first
    gates: jax.Array  # [rows, selected] float32: their probabilities, not renormalised


Experts = Callable[[jax.Array, Routing, ExpertWeights, jax.Array], jax.Array]
"""(rows [R, emb_size], routing, weights, valid [R] bool) -> [R, emb_size] float32."""


def expert(x: jax.Array, weights: ExpertWeights, index: jax.Array) -> jax.Array:
    """linear_1(gelu(linear(x)) · linear_v(x)) of one expert. [rows, emb_size], float32 out."""
    gate = jax.nn.gelu(matmul(x, weights.linear, index))
    up = matmul(x, weights.linear_v, index)
    return matmul((gate * up).astype(x.dtype), weights.linear_1, index)


def chosen_experts(
    x: jax.Array, routing: Routing, weights: ExpertWeights, valid: jax.Array
) -> jax.Array:
    """Computes each row's chosen experts only, grouped: an expert's weights serve all its rows.

    The (row, expert) pairs are sorted by expert and cut into blocks of rows of one expert; the
    loop runs over the blocks that exist. No pair is dropped. Rows that are not valid cost nothing
    and give 0.

    Args:
      x: [rows, emb_size] float.
      valid: [rows] bool.

    Returns:
      [rows, emb_size] float32: the sum over a row's experts of gate · expert(x).
    """
    kernels, stacks = kernels_and_stacks(x, weights.linear, weights.linear_v, weights.linear_1)
    if kernels is not None:
        return kernels.experts(x, routing.experts, routing.gates, valid, *stacks)
    rows, width = x.shape
    selected, num_experts = routing.experts.shape[1], routing.probabilities.shape[1]
    pairs = rows * selected
    block = min(rows, BLOCK_ROWS)
    choice = jnp.where(valid[:, None], routing.experts, num_experts).reshape(-1)
    order = jnp.argsort(choice, stable=True)
    counts = jnp.bincount(choice, length=num_experts)
    starts = jnp.cumsum(counts) - counts  # of each expert's pairs in the sorted order
    blocks = (counts + block - 1) // block
    block_ends = jnp.cumsum(blocks)
    # `block` rows of padding: the last block may reach over the end.
    x_sorted = jnp.pad(x[order // selected], ((0, block), (0, 0)))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        index = jnp.searchsorted(block_ends, i, side="right").astype(jnp.int32)
        row = starts[index] + (i - (block_ends[index] - blocks[index])) * block
        part = expert(jax.lax.dynamic_slice_in_dim(x_sorted, row, block), weights, index)
        # What reaches into the next expert's rows is overwritten by that expert's own block.
        return jax.lax.dynamic_update_slice_in_dim(out, part, row, axis=0)

    out = jnp.zeros((pairs + block, width), jnp.float32)
    out = jax.lax.fori_loop(0, block_ends[-1], body, out)
    place = jnp.argsort(order).reshape(rows, selected)
    gates = jnp.where(valid[:, None], routing.gates, 0.0)
    return jnp.sum(jnp.where(valid[:, None, None], out[place], 0.0) * gates[..., None], axis=1)


class Router(hk.Module):
    """Softmax over the experts in float32; the best `num_selected_experts` are used."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__(name="router")
        self.config = config

    def __call__(self, x: jax.Array) -> Routing:
        """[rows, emb_size] float32 -> the routing of each row."""
        shape = [x.shape[-1], self.config.num_experts]
        init = hk.initializers.VarianceScaling(1.0)
        weight = value(hk.get_parameter("w", shape, jnp.float32, init=init))
        logits = jnp.dot(x, weight, precision=product_precision(x.dtype))
        probabilities = jax.nn.softmax(logits, axis=-1)
        gates, experts = jax.lax.top_k(probabilities, self.config.num_selected_experts)
        return Routing(probabilities, experts, gates)


class ExpertLinear(hk.Module):
    """Holds one stacked matrix of all experts under the released name."""

    def __init__(self, shape: tuple[int, int, int], name: str) -> None:
        super().__init__(name=name)
        self.shape = shape

    def __call__(self) -> Weight:
        init = hk.initializers.VarianceScaling(1.0)
        weight: Weight = hk.get_parameter("w", self.shape, jnp.float32, init=init)
        return weight


class MoELayer(hk.Module):
    """The experts of one layer; how the chosen ones are computed can be given (`experts`)."""

    def __init__(self, config: GrokConfig, shards: ModelShards, experts: Experts) -> None:
        super().__init__(name="moe")
        self.config = config
        self.shards = shards
        self.experts = experts

    def __call__(self, x: jax.Array, routing: Routing, valid: jax.Array) -> jax.Array:
        """[rows, emb_size] float -> the same shape, float32: this shard's partial sum."""
        num, width = self.config.num_experts, self.config.emb_size
        ffn = self.config.ffn_size // self.shards.size
        weights = ExpertWeights(
            linear=ExpertLinear((num, width, ffn), "linear")(),
            linear_v=ExpertLinear((num, width, ffn), "linear_v")(),
            linear_1=ExpertLinear((num, ffn, width), "linear_1")(),
        )
        return self.experts(x, routing, weights, valid)
