"""Rows of one step do not touch each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_values import GOLDEN, PAGE_SIZE, golden_config, golden_parameters

from grok1_backend.model import steps
from grok1_backend.model.parameters import place_parameters
from grok1_backend.model.partition import create_mesh

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")
ROWS, TOKENS = 4, 8


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("native", jnp.float32), ("jax", jnp.float32), ("jax", jnp.bfloat16)],
    indirect=["backend"],
)
def test_neighbours_change_no_bit(dtype: Any) -> None:
    """Whatever their number, lengths, tokens and places, in the same executable."""
    config, mesh = golden_config(), create_mesh()
    parameters = place_parameters(golden_parameters("params_q8.npz"), config, mesh)
    width = config.sequence_len // PAGE_SIZE
    inputs, results = (steps.STEP_INPUT_SPECS,), (steps.LOGITS_SPEC, steps.POOL_SPECS)
    run = jax.jit(
        steps.on_mesh(steps.last_logits, parameters, mesh, config, dtype, inputs, results)
    )
    pool = steps.pool_creator(config, mesh, ROWS * width, PAGE_SIZE, dtype)()
    rng = np.random.default_rng(0)
    mine, mine_length = rng.integers(1, config.vocab_size, TOKENS), 6
    seen = []
    for place in (0, 3, 1, 2):
        tokens = rng.integers(1, config.vocab_size, (ROWS, TOKENS)).astype(np.int32)
        lengths = rng.integers(0, TOKENS + 1, ROWS).astype(np.int32)
        starts = rng.integers(0, 20, ROWS).astype(np.int32)
        tokens[place], lengths[place], starts[place] = mine, mine_length, 0
        table = rng.permutation(ROWS * width).reshape(ROWS, width).astype(np.int32)
        step = steps.StepInput(tokens, starts, lengths, table)  # type: ignore[arg-type]
        logits, new_pool = run(parameters, pool, step)
        keys = np.asarray(new_pool.keys)[:, table[place, 0], :mine_length]
        seen.append((np.asarray(logits)[place], keys))
    for logits, keys in seen[1:]:
        np.testing.assert_array_equal(logits, seen[0][0])
        np.testing.assert_array_equal(keys, seen[0][1])
