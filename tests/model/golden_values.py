"""The reference values of xAI's own code, and our model run on the same inputs and parameters.

`Serving` is the path that serves requests: stacked parameters, the scan over layers, pages. The
pages of a row are out of order on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from grok1_backend.model import steps
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.moe import Router
from grok1_backend.model.parameters import place_parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.model.quantization import QuantizedWeight8bit
from grok1_backend.model.transformer import DecoderLayer, forward

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden"
CASES = ("len1", "len5", "len17", "len31", "padded")
PAGE_SIZE = 8


def golden_config() -> GrokConfig:
    """The sizes of the tiny model that the reference values were made with."""
    stored = json.loads((GOLDEN / "config.json").read_text())
    names = {field.name for field in dataclasses.fields(GrokConfig)}
    return GrokConfig(**{name: value for name, value in stored.items() if name in names})


def golden_parameters(*files: str) -> dict[str, Any]:
    """Leaf name to array or `QuantizedWeight8bit`; a later file's tensors replace an earlier's."""
    stored: dict[str, Any] = {}
    for file in files:
        stored |= dict(np.load(GOLDEN / file))
    named: dict[str, Any] = {}
    for key, array in stored.items():
        if key.endswith(".weight"):
            name = key.removesuffix(".weight")
            named[name] = QuantizedWeight8bit(array, stored[f"{name}.scales"])
        elif not key.endswith(".scales"):
            named[key] = array.astype(np.float32)
    return named


@dataclasses.dataclass
class Step:
    """What one step of `Serving` computed for its row."""

    logits: np.ndarray[Any, Any]  # [tokens, vocabulary]
    router_probs: np.ndarray[Any, Any]  # [layers, tokens, experts]
    layer_out: np.ndarray[Any, Any]  # [layers, tokens, emb_size]


class Serving:
    """The step functions on a mesh of `shards` devices, one row at a time, everything visible."""

    def __init__(
        self, config: GrokConfig, named: dict[str, Any], dtype: Any, shards: int = 1
    ) -> None:
        self.config = config
        self.named = named
        mesh = create_mesh((1, shards))
        self.parameters = place_parameters(named, config, mesh)
        width = -(-config.sequence_len // PAGE_SIZE)
        self.table = np.arange(width, dtype=np.int32)[None, ::-1] + 3
        self.pool = steps.pool_creator(config, mesh, width + 4, PAGE_SIZE, dtype)()
        self.position = 0
        self._seen: dict[tuple[str, int], np.ndarray[Any, Any]] = {}
        self._step = jax.jit(
            steps.on_mesh(
                self._all_logits,
                self.parameters,
                mesh,
                config,
                dtype,
                (steps.STEP_INPUT_SPECS,),
                (P(None, "model"), steps.POOL_SPECS),
            ),
            donate_argnums=1,
        )

    def _all_logits(
        self, parameters: Any, pool: Any, step: steps.StepInput, **static: Any
    ) -> tuple[jax.Array, Any]:
        with hk.intercept_methods(self._watch):
            h, pool = steps.hidden_states(parameters, pool, step, **static)
        del static["dtype"]
        return steps.logits_of(parameters, h[0], **static), pool

    def _watch(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Copies the results of routers and layers to the host, whatever compiles them."""
        result = call(*args, **kwargs)
        kind = type(context.module)
        if context.method_name == "__call__" and kind in (Router, DecoderLayer):
            layer = next(iter(context.module.params_dict().values())).layer
            value = result.probabilities if kind is Router else result[0][0]
            jax.debug.callback(functools.partial(self._record, kind.__name__), layer, value)
        return result

    def _record(self, kind: str, layer: Any, value: Any) -> None:
        self._seen[kind, int(layer)] = np.asarray(value, np.float32)

    def _recorded(self, kind: str, length: int) -> np.ndarray[Any, Any]:
        layers = range(self.config.num_layers)
        return np.stack([self._seen[kind, layer][:length] for layer in layers])

    def feed(self, tokens: np.ndarray[Any, Any], bucket: int = 0) -> Step:
        """Computes tokens at the next positions, padded to a bucket with a token that is real."""
        length = len(tokens)
        padded = np.full((1, max(bucket, length)), 7, np.int32)
        padded[0, :length] = tokens
        step = steps.StepInput(padded, np.int32([self.position]), np.int32([length]), self.table)
        logits, self.pool = self._step(self.parameters, self.pool, step)
        logits = np.asarray(logits)[:length]
        jax.effects_barrier()
        self.position += length
        return Step(
            logits, self._recorded("Router", length), self._recorded("DecoderLayer", length)
        )

    def without_cache(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits [tokens, vocabulary] float32 of plain causal attention over all tokens."""
        modules: dict[str, dict[str, Any]] = {}
        for name, parameter in self.named.items():
            module, entry = name.rsplit("/", 1)
            modules.setdefault(module, {})[entry] = parameter
        run = hk.without_apply_rng(hk.transform(lambda tokens: forward(tokens, self.config)[0]))
        return np.asarray(jax.jit(run.apply)(modules, jnp.asarray(tokens)[None])[0])

    def restart(self) -> None:
        """Forgets the sequence; what it left in the pages stays, and must not matter."""
        self.position = 0

    def cache(self, layer: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys and values of one layer in order of position: [positions, KV heads, key size]."""

        def in_order(pages: jax.Array) -> np.ndarray[Any, Any]:
            rows = np.asarray(pages[layer].astype(jnp.float32))[self.table[0]]
            return rows.reshape(-1, *rows.shape[2:])[: self.position]

        return in_order(self.pool.keys), in_order(self.pool.values)
