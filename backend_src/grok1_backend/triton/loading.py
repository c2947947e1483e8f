"""Loads the engine for the model `grok1`. The one module here that imports JAX."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from grok1_backend.engine.build import ModelDirectory, build_engine
from grok1_backend.triton.engine_model import EngineModel
from grok1_backend.triton.environment import (
    keep_to_cpus,
    model_directory,
    model_parameters,
    num_slots,
)
from grok1_backend.triton.metrics import Metrics, MetricsObserver
from grok1_backend.triton.parsing import RequestParser


def load_engine_model(arguments: Mapping[str, str]) -> EngineModel:
    """Loads, compiles and starts what the arguments of `initialize` and the environment name.

    Raises:
      as `build_engine`, `ModelDirectory.read` and what reads the settings.
    """
    parameters = model_parameters(arguments)
    keep_to_cpus(parameters)
    path = model_directory(parameters)
    directory = ModelDirectory.read(path, num_slots=num_slots(parameters))
    parser = RequestParser(
        end_ids=(directory.config.eos_token,),
        default_max_tokens=directory.engine.default_max_tokens,
        tokenizer=directory.tokenizer,
    )
    observer = MetricsObserver()
    gc.disable()  # tracing leaves no garbage; to look for some is a tenth of a warm start
    engine = build_engine(directory, observer=observer, progress=_log)
    labels = {"model": arguments["model_name"], "version": arguments["model_version"]}
    model = EngineModel(engine, parser, Metrics(labels, engine.stats, observer))
    # What is there now stays. To look through all of it for garbage, as Python does now and then,
    # would stop every stream for a tenth of a second.
    gc.freeze()
    gc.enable()
    return model


def _log(line: str) -> None:
    # The launcher of the local server shows the lines that begin so.
    pb_utils.Logger.log_info(f"grok1: {line}")
