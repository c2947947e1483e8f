"""Assembles an engine from a model directory: `config.toml`, a checkpoint, `tokenizer.model`."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax

from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.checkpoint.progress import ProgressLog
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.memory_plan import size_pool
from grok1_backend.engine.runner import ModelRunner, Progress
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.engine.stats import Observer
from grok1_backend.model.config import GrokConfig, read_tables
from grok1_backend.model.partition import create_mesh
from grok1_backend.settings import from_table
from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """What a model directory says, before anything large is loaded."""

    path: Path
    config: GrokConfig
    runner: RunnerSettings
    engine: EngineSettings

    @classmethod
    def read(cls, path: str | Path, *, num_slots: int | None = None) -> ModelDirectory:
        """Reads `config.toml`.

        Args:
          num_slots: in place of the file's.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a field is unknown, missing or out of its limits.
        """
        path = Path(path)
        tables = read_tables(path)
        runner = from_table(RunnerSettings, tables.get("runner", {}), where="[runner]")
        return cls(
            path=path,
            config=from_table(GrokConfig, tables["model"], where="[model]"),
            runner=runner if num_slots is None else runner.with_slots(num_slots),
            engine=from_table(EngineSettings, tables.get("engine", {}), where="[engine]"),
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the checkpoint, if there is one."""
        file = self.path / TOKENIZER_FILE
        return Tokenizer(file) if file.is_file() else None


def build_runner(directory: ModelDirectory, progress: Progress) -> ModelRunner:
    """Loads the checkpoint onto the visible devices and compiles every bucket.

    Raises:
      CheckpointError: the checkpoint does not fit the config.
      ValueError: the model does not divide over the devices, there are too few, or their memory
        does not hold what the settings ask for.
    """
    _start_warm()
    settings = directory.runner
    shards = settings.model_shards or len(jax.devices())
    mesh = create_mesh((1, shards))
    parameters = load_parameters(
        directory.path,
        directory.config,
        mesh,
        ProgressLog("loading parameters", progress),
        int8_embedding=settings.embedding == "int8",
        activations=settings.dtype,
    )
    settings = size_pool(directory.config, settings, parameters, mesh)
    return ModelRunner(directory.config, parameters, mesh, settings, progress)


def build_engine(
    directory: ModelDirectory,
    *,
    observer: Observer | None = None,
    progress: Progress = print,
) -> Engine:
    """Loads a model directory, compiles every bucket and starts the scheduler thread.

    Args:
      directory: as read.
      observer: told of each request's moments, for metrics.
      progress: told a line about each thing that is done.

    Raises:
      as `build_runner`.
    """
    tokenizer = directory.tokenizer
    runner = build_runner(directory, progress)
    return Engine(
        runner,
        end_ids=(directory.config.eos_token,),
        token_bytes=tokenizer.token_bytes if tokenizer else None,
        settings=directory.engine,
        observer=observer,
    )


def _start_warm() -> None:
    """Persists every executable, however quickly it compiled, and leaves out what slows tracing."""
    default = Path.home() / ".cache" / "grok1-backend" / "jax"
    jax.config.update(
        "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default))
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Where in the source an operation comes from; its name stays.
    jax.config.update("jax_traceback_in_locations_limit", 0)
