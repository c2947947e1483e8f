"""What JAX compiles is counted, once for each program."""

from __future__ import annotations

import jax
import numpy as np

from grok1_backend.engine.compilations import compilations


def test_a_program_is_counted_when_it_is_compiled() -> None:
    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        return 3 * x + 1

    before = compilations()
    function(np.zeros(4, np.float32))
    assert compilations() == before + 1
    function(np.ones(4, np.float32))
    assert compilations() == before + 1
    function.lower(np.zeros(5, np.float32)).compile()
    assert compilations() == before + 2
