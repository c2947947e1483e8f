"""Time of the experts with all 8 chosen over time with 2: only chosen experts are computed.

Run it as `python benchmarks/experts.py`; `GROK1_NATIVE_KERNELS=0` measures JAX alone. Prints, for
1, 8 and 64 tokens, the least time of each and their quotient: 4 where work is all that costs.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grok1_backend.kernels import native
from grok1_backend.model.moe import ExpertWeights, Routing, chosen_experts
from grok1_backend.model.quantization import (
    BlockedWeight,
    LayerSlice,
    QuantizedWeight8bit,
    StackedWeight,
)

EXPERTS, WIDTH, FFN, REPEATS = 8, 1024, 5464, 20


def stack(rng: np.random.Generator, rows: int, columns: int) -> StackedWeight:
    weight = rng.integers(-127, 128, (1, EXPERTS, rows, columns), np.int8)
    blocked = native.takes_blocks(jnp.float32, weight.dtype, rows)
    if blocked:
        native.to_blocks(weight)
    scales = jnp.full((1, EXPERTS, 1, columns), 1e-3)
    quantized = QuantizedWeight8bit(jnp.asarray(weight), scales)
    return BlockedWeight(quantized) if blocked else quantized


@jax.jit
def run(x: Any, chosen: Any, gates: Any, stacks: Any) -> jax.Array:
    weights = ExpertWeights(*(LayerSlice(stack, jnp.int32(0)) for stack in stacks))
    routing = Routing(jnp.zeros((len(x), EXPERTS)), chosen, gates)
    return chosen_experts(x, routing, weights, jnp.ones(len(x), bool))


def least_seconds(tokens: int, selected: int, stacks: Any) -> float:
    """Every token has the same experts, so that 2 chosen are 2 read."""
    x = np.ones((tokens, WIDTH), np.float32)
    chosen = np.tile(np.arange(selected, dtype=np.int32), (tokens, 1))
    gates = np.ones((tokens, selected), np.float32)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one compiles
        began = time.perf_counter()
        run(x, chosen, gates, stacks).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    rng = np.random.default_rng(0)
    stacks = (stack(rng, WIDTH, FFN), stack(rng, WIDTH, FFN), stack(rng, FFN, WIDTH))
    print("native kernels" if native.available(jnp.float32) else "JAX alone")
    for tokens in (1, 8, 64):
        two, eight = (least_seconds(tokens, selected, stacks) for selected in (2, 8))
        print(
            f"{tokens:3} tokens: 2 chosen {two * 1e3:7.2f} ms, 8 chosen {eight * 1e3:7.2f} ms, "
            f"quotient {eight / two:.2f}"
        )


if __name__ == "__main__":
    main()
