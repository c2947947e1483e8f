"""How exactly products are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def product_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """For inputs of `dtype`: float32 means float32.

    On GPU JAX's default rounds float32 inputs to 10 bits (TF32), which would move router
    probabilities, and with them the choice of experts, by some 1e-3.
    """
    exact = jnp.dtype(dtype) == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
