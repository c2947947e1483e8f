"""Names and shapes of the parameters: per layer as stored, stacked over layers as they run.

A *leaf* is a tensor of the checkpoint under Haiku's name (`transformer/decoder_layer_3/router/w`);
a *stack* holds one kind of leaf of all layers (`transformer/decoder_layer/router/w`,
[layers, ...]). Leaves outside the layers are stacks of their own, without the leading axis.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grok1_backend.model.config import GrokConfig
from grok1_backend.model.embedding import EmbeddingTable
from grok1_backend.model.partition import (
    Layout,
    layout,
    model_shards,
    scales_layout,
    stack_sharding,
)
from grok1_backend.model.quantization import QuantizedWeight8bit, StackedWeight
from grok1_backend.model.transformer import forward

Parameters: TypeAlias = dict[str, StackedWeight | EmbeddingTable]
"""Stack name to stack: what the step functions run on."""

EMBEDDING = "language_model/in_out_embed/embeddings"
"""The name of the embedding table."""

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


def place_parameters(named: Mapping[str, Any], config: GrokConfig, mesh: Mesh) -> Parameters:
    """Stacks parameters that are in host memory and puts them on a mesh.

    Args:
      named: leaf name to array, or to `QuantizedWeight8bit` of arrays.
    """
    shards = model_shards(mesh)
    stacks: dict[str, list[Leaf]] = {}
    for leaf in leaves(config):
        stacks.setdefault(leaf.stack, []).append(leaf)

    def place(
        group: list[Leaf], part: Callable[[Any], Any], lay: Callable[..., Layout]
    ) -> jax.Array:
        group = sorted(group, key=lambda leaf: leaf.layer or 0)
        arrays = [np.asarray(part(named[leaf.name])) for leaf in group]
        cut = lay(group[0].stack, arrays[0].shape, config, shards)
        sharding = stack_sharding(mesh, group[0].stack)
        stacked = group[0].layer is not None

        def local(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
            axis = None if cut.axis is None else cut.axis + stacked
            size = 1 if cut.axis is None else cut.global_shape[cut.axis] // shards
            shard = 0 if axis is None or index is None else (index[axis].start or 0) // size
            pieces = [array[cut.slices(shard)] for array in arrays]
            return np.stack(pieces) if stacked else pieces[0]

        shape = (len(group), *cut.global_shape) if stacked else cut.global_shape
        return jax.make_array_from_callback(shape, sharding, local)

    placed: Parameters = {}
    for stack, group in stacks.items():
        if isinstance(named[group[0].name], QuantizedWeight8bit):
            placed[stack] = QuantizedWeight8bit(
                place(group, lambda weight: weight.weight, layout),
                place(group, lambda weight: weight.scales, scales_layout),
            )
        else:
            placed[stack] = place(group, lambda array: array, layout)
    return placed


def abstract_parameters(config: GrokConfig, mesh: Mesh, groups: int = 8) -> Parameters:
    """Shapes, dtypes and shardings of the parameters in the released format, to compile for.

    Args:
      groups: of scales, where a weight's rows are sharded.
    """
    shards = model_shards(mesh)
    stacks: dict[str, Any] = {}
    for leaf in leaves(dataclasses.replace(config, num_layers=1)):
        lead = () if leaf.layer is None else (config.num_layers,)
        sharding = stack_sharding(mesh, leaf.stack)

        def array(shape: tuple[int, ...], dtype: Any, sharding: Any = sharding) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        cut = layout(leaf.name, leaf.shape, config, shards)
        shape = (*lead, *cut.global_shape)
        if leaf.quantized:
            by_rows = cut.axis == len(leaf.shape) - 2
            stored = (*leaf.shape[:-2], groups if by_rows else 1, leaf.shape[-1])
            scales = scales_layout(leaf.name, stored, config, shards).global_shape
            stacks[leaf.stack] = QuantizedWeight8bit(
                array(shape, jnp.int8), array((*lead, *scales), jnp.bfloat16)
            )
        else:
            stacks[leaf.stack] = array(shape, jnp.float32)
    return stacks
