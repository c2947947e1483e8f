"""How likely given tokens were: the log-probabilities of prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grok1_backend.engine.sampler import _model_choice


def score(
    logits: jax.Array, targets: jax.Array, axis_name: str | None
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of one token a row, and the most likely ones.

    Args:
      logits: [R, V] float32; inside `shard_map` with `axis_name`, this device's [R, V / devices].
      targets: [R] int32; -1 where none is known: its log-probability is meaningless.

    Returns:
      [R] float32, and [R, TOP_TOKENS] int32.
    """
    choice = _model_choice(logits, axis_name)
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * logits.shape[1]
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=1)[:, 0]
    picked = jnp.where(mine, picked, 0.0)
    if axis_name is not None:
        picked = jax.lax.psum(picked, axis_name)
    return picked - choice.log_normalizer, choice.ids
