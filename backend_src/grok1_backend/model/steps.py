"""The model as it runs: stacked parameters, a scan over layers, KV pages, one `shard_map`.

These functions are the per-device program. The whole step is one `shard_map` region, so its
collectives are exactly those written here and in the modules: one all-reduce for the embedding,
two a layer. They are compiled by `engine.runner`, which owns the buckets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from grok1_backend.model.attention import KVPool, PagedContext, attend_pages, write_pages
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.embedding import EmbeddingTable
from grok1_backend.model.parameters import EMBEDDING, Parameters
from grok1_backend.model.partition import model_shards
from grok1_backend.model.quantization import LayerSlice
from grok1_backend.model.sharding import DATA_AXIS, MODEL_AXIS, ModelShards
from grok1_backend.model.transformer import DecoderLayer, LanguageModel

POOL_SPEC = P(None, DATA_AXIS, None, MODEL_AXIS, None)
POOL_SPECS = KVPool(POOL_SPEC, POOL_SPEC)  # type: ignore[arg-type]
LOGITS_SPEC = P(DATA_AXIS, MODEL_AXIS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInput:
    """The tokens of one step: of a prefill (T up to a bucket) or of a decode step (T = 1)."""

    tokens: jax.Array  # [B, T] int32
    starts: jax.Array  # [B] int32: position of each row's first token
    lengths: jax.Array  # [B] int32: real tokens of each row; 0 for a padding row
    block_table: jax.Array  # [B, W] int32: pages of each row's context


STEP_INPUT_SPECS = StepInput(P(DATA_AXIS, None), P(DATA_AXIS), P(DATA_AXIS), P(DATA_AXIS, None))  # type: ignore[arg-type]


def _nested(parameters: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Haiku's {module: {entry: value}} of the parameters under `prefix`, which is cut off."""
    nested: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if name.startswith(prefix):
            module, entry = name.removeprefix(prefix).rsplit("/", 1)
            nested.setdefault(module, {})[entry] = parameter
    return nested


def _apply(function: Callable[[jax.Array], jax.Array], parameters: Any, x: jax.Array) -> jax.Array:
    """Runs a function of Haiku modules on parameters."""
    transformed: Any = hk.transform(function)
    result: jax.Array = transformed.apply(parameters, None, x)
    return result


def hidden_states(
    parameters: Parameters,
    pool: KVPool,
    step: StepInput,
    *,
    config: GrokConfig,
    shards: ModelShards,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVPool]:
    """Runs all layers over a step's tokens, writing their keys and values to the pages.

    Args:
      parameters: this shard's stacks.
      pool: this shard's part of the pages.

    Returns:
      The residual stream [B, T, emb_size] float32 after the last layer, and the pool.
    """
    positions = step.starts[:, None] + jnp.arange(step.tokens.shape[1], dtype=jnp.int32)
    context = PagedContext(step.block_table, positions, step.lengths)

    def encode(tokens: jax.Array) -> jax.Array:
        return LanguageModel(config, shards).encode(tokens)

    def body(carry: tuple[jax.Array, KVPool], layer: jax.Array) -> tuple[Any, None]:
        h, pool = carry

        def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            nonlocal pool
            pool = write_pages(pool, layer, keys, values, context)
            return attend_pages(queries, pool, layer, context, config)

        def apply_layer(h: jax.Array) -> jax.Array:
            return DecoderLayer(config, dtype, shards)(h, positions, context.valid, attend)[0]

        stacks = _nested(parameters, "transformer/")
        slices = {
            module: {entry: LayerSlice(stack, layer) for entry, stack in entries.items()}
            for module, entries in stacks.items()
        }
        return (_apply(apply_layer, slices, h), pool), None

    h = _apply(encode, _nested(parameters, ""), step.tokens)
    # An array, not the loop's counter: XLA for GPUs would make each slice at it a copy of its own,
    # and of a layer's one graph several.
    layers = jnp.arange(config.num_layers, dtype=jnp.int32)
    (h, pool), _ = jax.lax.scan(body, (h, pool), layers)
    return h, pool


def logits_of(
    parameters: Parameters, h: jax.Array, *, config: GrokConfig, shards: ModelShards
) -> jax.Array:
    """Residual stream [rows, emb_size] -> logits [rows, this shard's vocabulary], all float32."""

    def decode(h: jax.Array) -> jax.Array:
        return LanguageModel(config, shards).decode(h)

    modules = _nested(parameters, "")
    table = parameters[EMBEDDING]
    if isinstance(table, jax.Array):  # not to be trained here: the native kernel may have it
        modules["language_model/in_out_embed"] = {"embeddings": EmbeddingTable(table, None)}
    return _apply(decode, modules, h)


def last_logits(
    parameters: Parameters,
    pool: KVPool,
    step: StepInput,
    *,
    config: GrokConfig,
    shards: ModelShards,
    dtype: DTypeLike,
) -> tuple[jax.Array, KVPool]:
    """A prefill or decode step: the logits after each row's last real token.

    Returns:
      Logits [B, this shard's vocabulary] float32, and the pool.
    """
    h, pool = hidden_states(parameters, pool, step, config=config, shards=shards, dtype=dtype)
    last = jnp.maximum(step.lengths - 1, 0)[:, None, None]
    h = jnp.take_along_axis(h, last, axis=1)[:, 0]
    return logits_of(parameters, h, config=config, shards=shards), pool


def on_mesh(
    function: Callable[..., Any],
    parameters: Parameters,
    mesh: Mesh,
    config: GrokConfig,
    dtype: DTypeLike,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """Makes a per-device step function one of global arrays, still to be compiled.

    Args:
      function: `(parameters, pool, ..., config=, shards=, dtype=)`.
      parameters: as loaded; only their shardings are looked at.
      in_specs: of the arguments after the parameters and the pool.
      out_specs: of all results.
    """
    parameter_specs = jax.tree.map(lambda array: array.sharding.spec, parameters)
    shards = ModelShards(model_shards(mesh))
    sharded: Callable[..., Any] = jax.shard_map(
        functools.partial(function, config=config, shards=shards, dtype=dtype),
        mesh=mesh,
        in_specs=(parameter_specs, POOL_SPECS, *in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return sharded


def pool_creator(
    config: GrokConfig, mesh: Mesh, num_pages: int, page_size: int, dtype: DTypeLike
) -> Callable[[], KVPool]:
    """Compiles a function that makes an empty pool.

    Args:
      num_pages: pages in all; over a `data` axis each row of devices has its share.

    Returns:
      A function that allocates: KV heads over `model`, pages over `data`.
    """
    kv_heads = max(config.num_kv_heads, model_shards(mesh))
    shape = (config.num_layers, num_pages, page_size, kv_heads, config.key_size)

    def create() -> KVPool:
        return KVPool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    compiled: Callable[[], KVPool] = (
        jax.jit(create, out_shardings=NamedSharding(mesh, POOL_SPEC)).lower().compile()
    )
    return compiled
