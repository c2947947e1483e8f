"""What the model itself says, before any setting of a request: best tokens and probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from grok1_backend.engine.filters import fenced_top_k, row_sum, top
from grok1_backend.engine.requests import TOP_TOKENS


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the model itself says, whatever the request's settings."""

    ids: Array  # [B, TOP_TOKENS] int32
    logits: Array  # [B, TOP_TOKENS]
    log_normalizer: Array  # [B]: log of the sum of exp(logits)
    finite: Array  # [B] bool

    @property
    def log_probs(self) -> Array:
        return self.logits - self.log_normalizer[:, None]


def model_choice(logits: Array, axis_name: str | None) -> ModelChoice:
    """Reads a row of logits: one small all-gather when the vocabulary is sharded.

    Args:
      logits: [B, V] float32; inside `shard_map` with `axis_name`, this device's [B, V / devices].
    """
    best, ids = top(logits, TOP_TOKENS)
    total = row_sum(jnp.exp(logits - best[:, :1]))
    finite = row_sum(jnp.where(jnp.isfinite(logits), 0.0, 1.0)) == 0
    if axis_name is not None:
        # One collective for all, of [devices, B, 2 * TOP_TOKENS + 2] float32, in which token ids
        # (below 2**24) are exact.
        ids = ids + lax.axis_index(axis_name) * logits.shape[1]
        packed = jnp.concatenate(
            [best, ids.astype(jnp.float32), total[:, None], finite[:, None].astype(jnp.float32)],
            axis=1,
        )
        parts = lax.all_gather(packed, axis_name)
        bests, all_ids = parts[:, :, :TOP_TOKENS], parts[:, :, TOP_TOKENS : 2 * TOP_TOKENS]
        best, index = fenced_top_k(_rows_of_parts(bests), TOP_TOKENS)
        ids = jnp.take_along_axis(_rows_of_parts(all_ids), index, axis=1).astype(jnp.int32)
        total = (parts[:, :, -2] * jnp.exp(bests[:, :, 0] - best[:, 0])).sum(axis=0)
        finite = (parts[:, :, -1] > 0).all(axis=0)
    log_normalizer = best[:, 0] + jnp.log(total)
    return ModelChoice(ids=ids, logits=best, log_normalizer=log_normalizer, finite=finite)


def _rows_of_parts(parts: Array) -> Array:
    """[devices, B, n] → [B, devices * n]."""
    return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)


def score(logits: Array, targets: Array, axis_name: str | None) -> tuple[Array, Array, Array]:
    """The log-probability of one given token a row, and the most likely ones.

    Args:
      logits: [R, V] float32; inside `shard_map` with `axis_name`, this device's [R, V / devices].
      targets: [R] int32; -1 where none is known: its log-probability is meaningless.

    Returns:
      [R] float32; [R, TOP_TOKENS] int32 and, their log-probabilities, float32.
    """
    choice = model_choice(logits, axis_name)
    first = 0 if axis_name is None else lax.axis_index(axis_name) * logits.shape[1]
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=1)[:, 0]
    picked = jnp.where(mine, picked, 0.0)
    if axis_name is not None:
        picked = lax.psum(picked, axis_name)
    return picked - choice.log_normalizer, choice.ids, choice.log_probs
