"""Bits that the model needs for a text, computed as it is served: no token without its experts."""

from __future__ import annotations

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.transformer import forward
from training.objective import Params, StoredParams, cross_entropy
from training.tokenizer import BOS, PAD, Tokens

WINDOW = 512
STRIDE = 384
BATCH = 8


class ModelScorer:
    """Scores windows of tokens; compiled once, for any parameters of the config."""

    def __init__(self, config: GrokConfig) -> None:
        model = hk.transform(lambda tokens: forward(tokens, config))

        def score(params: Params | StoredParams, tokens: jax.Array) -> jax.Array:
            logits, _ = model.apply(params, None, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:]) / math.log(2)

        self._score = jax.jit(score)

    def bits(
        self, params: Params | StoredParams, windows: Tokens
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Bits of each token but the first: [BATCH, n + 1] -> [BATCH, n]."""
        return np.asarray(self._score(params, jnp.asarray(windows)))


def bits_of_stream(scorer: ModelScorer, params: Params | StoredParams, stream: Tokens) -> float:
    """Bits of all tokens of a stream [tokens] but its first, which must be `BOS`.

    Windows of `WINDOW` tokens move on by `STRIDE`; only what a window adds is counted, so that a
    token is predicted from at least `WINDOW - STRIDE` before it, where there are so many.
    """
    targets = stream[1:]
    starts = range(0, max(1, len(targets) - WINDOW + STRIDE), STRIDE)
    total = 0.0
    for i in range(0, len(starts), BATCH):
        windows = np.full((BATCH, WINDOW + 1), PAD, np.int32)
        counted = np.zeros((BATCH, WINDOW), bool)
        for row, start in enumerate(starts[i : i + BATCH]):
            part = targets[start : start + WINDOW]
            windows[row, 0] = BOS
            windows[row, 1 : len(part) + 1] = part
            counted[row, WINDOW - STRIDE if start else 0 : len(part)] = True
        total += float(np.sum(scorer.bits(params, windows), where=counted))
    return total
