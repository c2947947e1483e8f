"""The device side of the engine: parameters, KV pages, decode state, compiled steps.

`ModelRunner` keeps the name of the layer in xAI's research code. It implements `runner_api.Runner`:
each call pads its rows to a bucket, dispatches one compiled forward and one compiled sampler, and
returns at once. Nothing is compiled after construction.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from grok1_backend.engine import programs
from grok1_backend.engine.compilations import compilations
from grok1_backend.engine.compiler_options import compiler_options
from grok1_backend.engine.decode_state import initial_state, slot_start
from grok1_backend.engine.huge_pages import collapse
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow, PromptScores, StepOutput
from grok1_backend.engine.runner_settings import RunnerSettings, bucket
from grok1_backend.engine.sampler import Variant, unpack
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import Parameters
from grok1_backend.model.steps import StepInput, pool_creator

Progress = Callable[[str], None]
"""Told a line about each thing that is done at start-up."""

COMPILE_THREADS = 2
"""More do not help: tracing holds the interpreter's lock, and XLA uses several cores itself."""


@dataclass(frozen=True, eq=False)
class Step:
    """A dispatched step; its first `rows` rows are real."""

    packed: jax.Array  # `SampleOutput.packed`
    rows: int
    donated: list[Any]
    """Arrays that this step and what came before it took over. On CPU the host would wait where it
    lets go of one before the program that took it has run."""

    def result(self) -> StepOutput:
        """Waits for the device."""
        return unpack(np.asarray(self.packed)[: self.rows])


@dataclass(frozen=True, eq=False)
class ScoredStep(Step):
    """A dispatched prefill of one row that also scores each position."""

    position_log_probs: jax.Array  # [bucket] float32
    position_top_ids: jax.Array  # [bucket, TOP_TOKENS] int32
    position_top_log_probs: jax.Array  # [bucket, TOP_TOKENS] float32
    length: int

    def scores(self) -> PromptScores:
        log_probs, top_ids, top_log_probs = (
            array[: self.length]
            for array in jax.device_get(
                (self.position_log_probs, self.position_top_ids, self.position_top_log_probs)
            )
        )
        return PromptScores(log_probs=log_probs, top_ids=top_ids, top_log_probs=top_log_probs)


class ModelRunner:
    """See `runner_api.Runner`. Owns the device memory; only one thread may call it."""

    def __init__(
        self,
        config: GrokConfig,
        parameters: Parameters,
        mesh: Mesh,
        settings: RunnerSettings,
        progress: Progress,
    ) -> None:
        """Allocates the pages and the decode state, and compiles every bucket.

        Args:
          parameters: on `mesh`, as `checkpoint.load` or `place_parameters` give them.
        """
        self.config = config
        self.settings = settings
        self.num_slots = settings.num_slots
        self.num_pages = settings.pages_for(config)
        self.page_size = settings.page_size
        self.context_length = config.sequence_len
        self.vocab_size = config.vocab_size
        self.max_prefill_tokens = settings.prefill_tokens[-1]
        self.max_prefill_rows = settings.prefill_rows[-1]
        dtype = jnp.dtype(settings.dtype)
        replicated = NamedSharding(mesh, P())
        self._parameters = parameters
        collapse(parameters)
        self._create_pool = pool_creator(config, mesh, self.num_pages, self.page_size, dtype)
        state = functools.partial(initial_state, self.num_slots, self.vocab_size)
        self._create_state = jax.jit(state, out_shardings=replicated).lower().compile()
        self.recover()
        self._table_width = -(-config.sequence_len // self.page_size)
        self._steps = programs.build(config, parameters, mesh, dtype)
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._compile_all(mesh, progress)
        self._compiled_before = compilations()

    @property
    def num_compilations(self) -> int:
        return compilations() - self._compiled_before

    def recover(self) -> None:
        # A step that raised may have taken the donated buffers with it.
        self._donated: list[Any] = []
        self._pool = self._create_pool()
        collapse(self._pool)
        self._state = self._create_state()
        # What each slot needs of the sampler.
        self._variants = [Variant.GREEDY] * self.num_slots

    def prefill_cost(self, lengths: Sequence[int]) -> int:
        rows = bucket(len(lengths), self.settings.prefill_rows)
        return rows * bucket(max(lengths), self.settings.prefill_tokens)

    def start_slot(
        self, slot: int, sampling: SamplingParams, history: NDArray[np.int32], num_prompt: int
    ) -> None:
        start = slot_start(
            sampling,
            history,
            num_prompt,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
        )
        self._variants[slot] = Variant.of(sampling)
        run = self._compiled["start", start.edits is not None]
        self._donated.append(self._state)
        self._state = run(self._state, np.asarray(slot, np.int32), start)

    def prefill(self, rows: Sequence[PrefillRow]) -> Step:
        step = self._prefill_input(rows)
        run = self._compiled["prefill", *step.tokens.shape]
        self._donated.append(self._pool)
        logits, self._pool = run(self._parameters, self._pool, step)
        return self._sample(logits, [row.slot for row in rows], [row.sample for row in rows])

    def prefill_scored(self, row: PrefillRow, next_token: int) -> ScoredStep:
        step = self._prefill_input([row])
        length = len(row.tokens)
        targets = np.full((step.tokens.shape[1],), -1, np.int32)
        targets[:length] = [*row.tokens[1:], next_token]
        run = self._compiled["score", step.tokens.shape[1]]
        self._donated.append(self._pool)
        logits, scores, self._pool = run(self._parameters, self._pool, step, targets)
        sampled = self._sample(logits, [row.slot], [row.sample])
        log_probs, top_ids, top_log_probs = scores
        return ScoredStep(
            sampled.packed, 1, sampled.donated, log_probs, top_ids, top_log_probs, length
        )

    def decode(self, rows: Sequence[DecodeRow]) -> Step:
        padded = bucket(len(rows), self.settings.decode_rows)
        slots = self._slots([row.slot for row in rows], padded)
        table = self._block_table([row.pages for row in rows], padded)
        run = self._compiled["decode", padded]
        state = self._state
        self._donated.append(self._pool)
        logits, self._pool = run(
            self._parameters, self._pool, state.last_token, state.length, slots, table
        )
        return self._sample(logits, [row.slot for row in rows], [True] * len(rows))

    def _prefill_input(self, rows: Sequence[PrefillRow]) -> StepInput:
        lengths = [len(row.tokens) for row in rows]
        height = bucket(len(rows), self.settings.prefill_rows)
        tokens = np.zeros((height, bucket(max(lengths), self.settings.prefill_tokens)), np.int32)
        starts = np.zeros(height, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = row.tokens
            starts[i] = row.start
        padded_lengths = np.zeros(height, np.int32)
        padded_lengths[: len(rows)] = lengths
        table = self._block_table([row.pages for row in rows], height)
        return StepInput(tokens, starts, padded_lengths, table)  # type: ignore[arg-type]

    def _block_table(self, pages: Sequence[Sequence[int]], rows: int) -> NDArray[np.int32]:
        table = np.zeros((rows, self._table_width), np.int32)
        for row, owned in zip(table, pages, strict=False):
            row[: len(owned)] = owned
        return table

    def _slots(self, slots: list[int], rows: int) -> NDArray[np.int32]:
        """[rows]: the slots, padded with the scratch row."""
        return np.array(slots + [self.num_slots] * (rows - len(slots)), np.int32)

    def _sample(self, logits: jax.Array, slots: list[int], advance: list[bool]) -> Step:
        rows = logits.shape[0]
        drawing = [
            self._variants[slot] for slot, draws in zip(slots, advance, strict=True) if draws
        ]
        run = self._compiled["sample", rows, max(drawing, default=Variant.GREEDY)]
        moves = np.array(advance + [False] * (rows - len(slots)), np.bool_)
        self._donated.append(self._state)
        self._state, packed = run(self._state, logits, self._slots(slots, rows), moves)
        packed.copy_to_host_async()
        step = Step(packed, len(slots), self._donated)
        self._donated = []
        return step

    def _compile_all(self, mesh: Mesh, progress: Progress) -> None:
        """Compiles every executable, in the order in which a request would need them."""
        jobs = programs.jobs(
            self.settings,
            self._steps,
            programs.AbstractArguments.of(self, mesh, self._parameters, self._pool, self._state),
        )
        options = compiler_options()

        def compile_one(job: programs.Job) -> tuple[programs.Job, Any, float]:
            began = time.monotonic()
            compiled = job.function.lower(*job.arguments).compile(compiler_options=options)
            return job, compiled, time.monotonic() - began

        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for number, (job, compiled, seconds) in enumerate(pool.map(compile_one, jobs), 1):
                self._compiled[job.key] = compiled
                progress(f"compiled {number}/{len(jobs)} {job.name} ({seconds:.1f} s)")
