"""The least time that a step can take: its bytes at the bandwidth, or its arithmetic at its rate.

Counts what a step must do, of the chosen experts only, for the benchmark's model.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from bench_model import CONFIG

ITEM_BYTES = {"int8": 1, "float32": 4}
EXPERT_VALUES = 3 * CONFIG.emb_size * CONFIG.ffn_size
"""Weights of one expert of one layer."""


class Rates(Protocol):
    """What a machine does in a second (`machine.py`)."""

    @property
    def bytes_per_s(self) -> float: ...
    @property
    def float32_flop_per_s(self) -> float: ...
    @property
    def int8_op_per_s(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a step must read, and what it must compute in each type; a multiply-add counts twice."""

    bytes: float
    float32_flop: float
    int8_op: float

    def least_seconds(self, rates: Rates) -> float:
        arithmetic = (
            self.float32_flop / rates.float32_flop_per_s + self.int8_op / rates.int8_op_per_s
        )
        return max(self.bytes / rates.bytes_per_s, arithmetic)


def expected_experts(tokens: int) -> float:
    """How many experts of a layer are touched by tokens that choose at random."""
    share = CONFIG.num_selected_experts / CONFIG.num_experts
    return CONFIG.num_experts * (1 - (1 - share) ** tokens)


def needs(
    rows: int,
    tokens: int,
    start: float,
    *,
    weights: str,
    embedding: str = "float32",
    arithmetic: str | None = None,
    experts: float | None = None,
) -> Needs:
    """Of one step: `rows` requests with `tokens` new tokens each after `start` others.

    Args:
      weights: how the matrices of the layers are stored, a key of `ITEM_BYTES`.
      embedding: how the embedding is stored, which also makes the logits of each row's last token.
      arithmetic: the type that products of the layers are counted in; None: that of `weights`.
      experts: distinct ones that a layer's tokens touch; None: as expected of random choices.
    """
    config, total = CONFIG, rows * tokens
    touched = expected_experts(total) if experts is None else experts
    heads = config.num_q_heads + config.num_kv_heads
    projections = 2 * config.emb_size * config.key_size * heads
    vocabulary = config.vocab_size * config.emb_size
    kv = rows * (start + tokens) * 2 * config.num_kv_heads * config.key_size * 4
    layer = (touched * EXPERT_VALUES + projections) * ITEM_BYTES[weights] + kv
    read = config.num_layers * layer + vocabulary * ITEM_BYTES[embedding]

    per_token = config.num_selected_experts * EXPERT_VALUES + projections
    seen = total * (start + (tokens + 1) / 2)
    attention = config.num_layers * seen * 2 * config.num_q_heads * config.key_size
    work = dict.fromkeys(ITEM_BYTES, 0.0)
    work[arithmetic or weights] += config.num_layers * total * per_token
    work[embedding] += rows * vocabulary
    work["float32"] += attention
    return Needs(read, 2 * work["float32"], 2 * work["int8"])
