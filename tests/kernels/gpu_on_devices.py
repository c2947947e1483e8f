"""Run by test_gpu_on_devices.py in a process of its own, since the number of host devices is fixed
when JAX starts. Prints a JSON object of what the tests judge.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grok1_backend.kernels import choice, native
from grok1_backend.kernels.gpu import launch
from grok1_backend.model import steps
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import init_parameters, place_parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.model.quantization import quantize

CONFIG = GrokConfig(  # experts 512 wide, so that an eighth is whole tiles
    vocab_size=256,
    sequence_len=64,
    emb_size=96,
    num_layers=2,
    num_q_heads=16,
    num_kv_heads=8,
    key_size=16,
    widening_factor=8,
    num_experts=8,
    num_selected_experts=2,
    embedding_multiplier_scale=1.0,
    output_multiplier_scale=1.0,
    attn_output_multiplier=0.25,
    attn_logit_cap=5.0,
    rope_base=10000.0,
    rms_norm_eps=1e-5,
    pad_token=0,
    bos_token=1,
    eos_token=2,
)
SHARDS, PAGE, ROWS = 8, 8, 2
PROMPT, NEW = 40, 1


def parameters(mesh: Mesh) -> Any:
    """As released: int8, 8 groups of scales where the rows are sharded."""
    named: dict[str, Any] = dict(init_parameters(CONFIG, 0))
    for name, array in named.items():
        if "/moe/" in name or "/multi_head_attention/" in name:
            by_rows = name.endswith(("linear_1/w", "multi_head_attention/linear/w"))
            named[name] = quantize(array, SHARDS if by_rows else 1)
        elif name.endswith("/scale"):
            named[name] = jnp.ones_like(array)
    return place_parameters(named, CONFIG, mesh)


def compiled(mesh: Mesh, weights: Any) -> Any:
    results = (steps.LOGITS_SPEC, steps.POOL_SPECS)
    inputs = (steps.STEP_INPUT_SPECS,)
    run = steps.on_mesh(steps.last_logits, weights, mesh, CONFIG, jnp.float32, inputs, results)
    return jax.jit(run)


def step_inputs() -> Iterator[steps.StepInput]:
    """A prefill of uneven prompts, and a decode step."""
    tokens = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (ROWS, PROMPT + NEW))
    width = CONFIG.sequence_len // PAGE
    table = np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width)[:, ::-1]
    lengths = np.array([PROMPT, 5])
    for chunk, starts, counts in (
        (tokens[:, :PROMPT], np.zeros(ROWS), lengths),
        (tokens[:, PROMPT:], lengths, np.ones(ROWS)),
    ):
        arrays = (np.asarray(array, np.int32) for array in (chunk, starts, counts, table))
        yield steps.StepInput(*arrays)  # type: ignore[arg-type]


def logits(mesh: Mesh, weights: Any) -> list[np.ndarray[Any, Any]]:
    pool = steps.pool_creator(CONFIG, mesh, 32, PAGE, jnp.float32)()
    run, found = compiled(mesh, weights), []
    for step in step_inputs():
        out, pool = run(weights, pool, step)
        found.append(np.asarray(out))
    return found


def primitives(jaxpr: Any) -> Iterator[str]:
    """Of a program and the programs in it, but not within kernels: of these, the names."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pallas_call":
            yield equation.params["jaxpr"].debug_info.func_name
        else:
            yield name
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def main() -> None:
    mesh = create_mesh((1, SHARDS))
    weights = parameters(mesh)
    native.available = lambda _: False
    expected = logits(mesh, weights)
    choice.on_gpu = lambda: True
    launch.INTERPRET = True
    found = logits(mesh, weights)

    traced = functools.partial(jax.make_jaxpr(compiled(mesh, weights)), weights)
    pool = steps.pool_creator(CONFIG, mesh, 32, PAGE, jnp.float32)()
    print(
        json.dumps(
            {
                "distance": [
                    float(np.abs(a - b).max() / np.abs(b).max())
                    for a, b in zip(found, expected, strict=True)
                ],
                "primitives": [
                    collections.Counter(primitives(traced(pool, step).jaxpr))
                    for step in step_inputs()
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
