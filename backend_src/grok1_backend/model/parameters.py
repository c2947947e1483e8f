"""Names and shapes of the parameters: per layer as stored, stacked over layers as they run.

A *leaf* is a tensor of the checkpoint under Haiku's name (`transformer/decoder_layer_3/router/w`);
a *stack* holds one kind of leaf of all layers (`transformer/decoder_layer/router/w`,
[layers, ...]). Leaves outside the layers are stacks of their own, without the leading axis.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

import haiku as hk
import jax
import jax.numpy as jnp

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.quantization import QuantizedWeight8bit
from grok1_backend.model.transformer import forward

Parameters: TypeAlias = dict[str, jax.Array | QuantizedWeight8bit]
"""Stack name to stack: what the step functions run on."""

_LAYER = re.compile(r"/decoder_layer_(\d+)/")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    quantized: bool
    """Whether the released checkpoint holds it in int8 (it may be float in others)."""

    @property
    def stack(self) -> str:
        """The name of the stack that it goes to."""
        return _LAYER.sub("/decoder_layer/", self.name)

    @property
    def layer(self) -> int | None:
        """Its place in the stack; None outside the layers."""
        match = _LAYER.search(self.name)
        return int(match[1]) if match else None


def leaves(config: GrokConfig) -> list[Leaf]:
    """All tensors of a checkpoint in its order: sorted names, so layers go 0, 1, 10, 11, ..."""
    # The shapes come from Haiku itself; one layer is traced and stands for all.
    one_layer = dataclasses.replace(config, num_layers=1)
    init = hk.transform(lambda tokens: forward(tokens, one_layer)).init
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    modules = jax.eval_shape(init, jax.random.key(0), tokens)
    found = []
    for module, entries in modules.items():
        for entry, leaf in entries.items():
            name, shape = f"{module}/{entry}", tuple(leaf.shape)
            quantized = "/moe/" in name or "/multi_head_attention/" in name
            layers = range(config.num_layers) if _LAYER.search(name) else [0]
            found += [
                Leaf(_LAYER.sub(f"/decoder_layer_{i}/", name), shape, quantized) for i in layers
            ]
    return sorted(found, key=lambda leaf: leaf.name)


def init_parameters(config: GrokConfig, seed: int) -> dict[str, jax.Array]:
    """Random float parameters under their leaf names (tests and training)."""
    init = hk.transform(lambda tokens: forward(tokens, config)).init
    modules = jax.jit(init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))
    return {
        f"{module}/{entry}": leaf
        for module, entries in modules.items()
        for entry, leaf in entries.items()
    }
