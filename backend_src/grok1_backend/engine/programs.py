"""The compiled functions of `ModelRunner`: what is traced, and the shapes it is traced for."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grok1_backend.engine.decode_state import DecodeState, slot_start, start_slot
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.sampler import Variant, sample
from grok1_backend.engine.scoring import score
from grok1_backend.model.attention import KVPool
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import Parameters
from grok1_backend.model.partition import model_shards
from grok1_backend.model.sharding import MODEL_AXIS, ModelShards
from grok1_backend.model.steps import (
    LOGITS_SPEC,
    POOL_SPECS,
    STEP_INPUT_SPECS,
    StepInput,
    hidden_states,
    last_logits,
    logits_of,
    on_mesh,
)

if TYPE_CHECKING:
    from grok1_backend.engine.runner import ModelRunner

SCORE_ROWS = 16
"""Positions whose logits a scoring prefill holds at a time."""


def _decode(
    parameters: Parameters,
    pool: KVPool,
    last_token: jax.Array,
    length: jax.Array,
    slots: jax.Array,
    block_table: jax.Array,
    **static: Any,
) -> tuple[jax.Array, KVPool]:
    """One decode step: feeds each slot's newest token at the last position of its context.

    Args:
      last_token, length: [slots + 1] int32, of `DecodeState`; the last row pads.
      slots: [B] int32.
      block_table: [B, W] int32.
    """
    real = (slots < last_token.shape[0] - 1).astype(jnp.int32)
    step = StepInput(
        tokens=last_token[slots][:, None],
        starts=jnp.maximum(length[slots] - 1, 0),
        lengths=real,
        block_table=block_table,
    )
    return last_logits(parameters, pool, step, **static)


def _score(
    parameters: Parameters,
    pool: KVPool,
    step: StepInput,
    targets: jax.Array,
    *,
    config: GrokConfig,
    shards: ModelShards,
    **static: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...], KVPool]:
    """A prefill of one row that also says how likely each `targets` [T] was after its token.

    Returns:
      The logits after the last token [1, V], (log-probs [T], top ids and their log-probs, both
      [T, TOP_TOKENS]), the pool.
    """
    static |= {"config": config, "shards": shards}
    h, pool = hidden_states(parameters, pool, step, **static)
    to_logits = functools.partial(logits_of, parameters, config=config, shards=shards)
    axis = MODEL_AXIS if shards.size > 1 else None

    def tile(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        return score(to_logits(rows[0]), rows[1], axis)

    length = targets.shape[0]
    padding = -length % SCORE_ROWS
    states = jnp.pad(h[0], ((0, padding), (0, 0))).reshape(-1, SCORE_ROWS, h.shape[-1])
    wanted = jnp.pad(targets, (0, padding)).reshape(-1, SCORE_ROWS)
    tiles = jax.lax.map(tile, (states, wanted))
    last = jax.lax.dynamic_index_in_dim(h[0], step.lengths[0] - 1)
    scores = tuple(part.reshape(-1, *part.shape[2:])[:length] for part in tiles)
    return to_logits(last), scores, pool


@dataclass(frozen=True)
class Programs:
    """The jitted functions, not yet compiled. Pools and states are donated.

    Samplers give the new state and `SampleOutput.packed`.
    """

    start: Any
    prefill: Any
    decode: Any
    score: Any
    sample: dict[Variant, Any]


def build(
    config: GrokConfig, parameters: Parameters, mesh: Mesh, dtype: jnp.dtype[Any]
) -> Programs:
    """Makes the functions for parameters on a mesh."""
    over_mesh = functools.partial(
        on_mesh, parameters=parameters, mesh=mesh, config=config, dtype=dtype
    )
    axis = MODEL_AXIS if model_shards(mesh) > 1 else None
    logits_and_pool = (LOGITS_SPEC, POOL_SPECS)

    def sampler(variant: Variant) -> Any:
        def function(state: DecodeState, logits: Any, slots: Any, advance: Any) -> Any:
            state, output = sample(state, logits, slots, advance, variant, axis)
            return state, output.packed()

        sharded = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(P(), LOGITS_SPEC, P(), P()),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(sharded, donate_argnums=0)

    prefill = over_mesh(last_logits, in_specs=(STEP_INPUT_SPECS,), out_specs=logits_and_pool)
    decode = over_mesh(_decode, in_specs=(P(), P(), P(), P()), out_specs=logits_and_pool)
    scored = over_mesh(
        _score, in_specs=(STEP_INPUT_SPECS, P()), out_specs=(LOGITS_SPEC, P(), POOL_SPECS)
    )
    return Programs(
        start=jax.jit(start_slot, donate_argnums=0, out_shardings=NamedSharding(mesh, P())),
        prefill=jax.jit(prefill, donate_argnums=1),
        decode=jax.jit(decode, donate_argnums=1),
        score=jax.jit(scored, donate_argnums=1),
        sample={variant: sampler(variant) for variant in Variant},
    )


@dataclass(frozen=True)
class AbstractArguments:
    """Shapes and shardings of the arguments, to compile without running."""

    parameters: Any
    pool: Any
    state: DecodeState
    logits_sharding: NamedSharding
    vocab_size: int
    context_length: int
    table_width: int

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        mesh: Mesh,
        parameters: Parameters,
        pool: KVPool,
        state: DecodeState,
    ) -> AbstractArguments:
        def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

        return cls(
            jax.tree.map(abstract, parameters),
            jax.tree.map(abstract, pool),
            jax.tree.map(abstract, state),
            NamedSharding(mesh, LOGITS_SPEC),
            runner.vocab_size,
            runner.context_length,
            -(-runner.context_length // runner.page_size),
        )

    def start(self, edits: bool) -> tuple[Any, ...]:
        sampling = SamplingParams(seed=0, presence_penalty=float(edits))
        start = slot_start(
            sampling,
            np.zeros(1, np.int32),
            1,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
        )
        return self.state, np.int32(0), start

    def prefill(self, rows: int, tokens: int) -> tuple[Any, ...]:
        step = StepInput(_ints(rows, tokens), _ints(rows), _ints(rows), self._table(rows))
        return self.parameters, self.pool, step

    def decode(self, rows: int) -> tuple[Any, ...]:
        state = self.state
        arguments = (state.last_token, state.length, _ints(rows), self._table(rows))
        return self.parameters, self.pool, *arguments

    def score(self, tokens: int) -> tuple[Any, ...]:
        return *self.prefill(1, tokens), _ints(tokens)

    def sample(self, rows: int) -> tuple[Any, ...]:
        logits = jax.ShapeDtypeStruct(
            (rows, self.vocab_size), jnp.float32, sharding=self.logits_sharding
        )
        return self.state, logits, _ints(rows), jax.ShapeDtypeStruct((rows,), jnp.bool_)

    def _table(self, rows: int) -> Any:
        return _ints(rows, self.table_width)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclass(frozen=True)
class Job:
    """One executable to compile."""

    key: tuple[Any, ...]
    """How the runner finds it: what it is, then its buckets."""
    function: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        parts = (part.name if isinstance(part, Variant) else part for part in self.key)
        return " ".join(map(str, parts)).lower()


def jobs(settings: RunnerSettings, programs: Programs, abstract: AbstractArguments) -> list[Job]:
    """Everything that is compiled before the runner is ready: every bucket of every program."""
    decode_rows, prefill_tokens = settings.decode_rows, settings.prefill_tokens
    return [
        *(Job(("start", edits), programs.start, abstract.start(edits)) for edits in (False, True)),
        *(
            Job(("prefill", rows, tokens), programs.prefill, abstract.prefill(rows, tokens))
            for rows, tokens in itertools.product(settings.prefill_rows, prefill_tokens)
        ),
        *(Job(("decode", rows), programs.decode, abstract.decode(rows)) for rows in decode_rows),
        *(
            Job(("sample", rows, variant), programs.sample[variant], abstract.sample(rows))
            for rows, variant in itertools.product(decode_rows, Variant)
        ),
        *(Job(("score", size), programs.score, abstract.score(size)) for size in prefill_tokens),
    ]
