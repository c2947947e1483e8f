"""Where the model is, and its slots and processors: environment first, then config.pbtxt."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer

_CPU_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


def model_parameters(arguments: Mapping[str, str]) -> dict[str, str]:
    """The `parameters` of a model's config.pbtxt, from the arguments of `initialize`."""
    parameters = json.loads(arguments["model_config"])["parameters"]
    return {name: value["string_value"] for name, value in parameters.items()}


def model_directory(parameters: Mapping[str, str]) -> Path:
    """The folder of `config.toml`, checkpoint and tokenizer: GROK1_MODEL, or `model`.

    Raises:
      ValueError: neither is set, or it is no directory.
    """
    path = _setting(parameters, "model")
    if not path:
        raise ValueError("set GROK1_MODEL, or `model` in config.pbtxt, to a model directory")
    if not Path(path).is_dir():
        raise ValueError(f"the model directory {path} does not exist")
    return Path(path)


def num_slots(parameters: Mapping[str, str]) -> int | None:
    """Rows of the decode batch: GROK1_SLOTS, or `slots`; None: as the model's config says.

    Raises:
      ValueError: not a positive number.
    """
    slots = _setting(parameters, "slots")
    if not slots:
        return None
    if not slots.isdecimal() or int(slots) < 1:
        raise ValueError(f"slots is {slots!r}: a whole number of at least 1")
    return int(slots)


def keep_to_cpus(parameters: Mapping[str, str]) -> None:
    """Keeps this thread, and all that it starts from now on, to GROK1_CPUS, or `cpus`, if set.

    To be called before JAX makes its threads, of which it makes one a processor.

    Raises:
      ValueError: not a list of processors, or of some that are not there.
    """
    text = _setting(parameters, "cpus")
    if not text:
        return
    if not _CPU_LIST.fullmatch(text):
        raise ValueError(f"cpus is {text!r}: numbers of processors, such as 0-5,8")
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    with contextlib.suppress(OSError):  # none of them is there
        os.sched_setaffinity(0, cpus)
    if os.sched_getaffinity(0) != cpus:
        raise ValueError(f"cpus is {text!r}: not all of them can be used here")


def load_tokenizer(arguments: Mapping[str, str]) -> Tokenizer:
    """The tokenizer of the model directory.

    Raises:
      ValueError: there is no model directory, or no tokenizer in it.
    """
    path = model_directory(model_parameters(arguments)) / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"the text models need {path}, which does not exist")
    return Tokenizer(path)


def _setting(parameters: Mapping[str, str], name: str) -> str | None:
    return os.environ.get(f"GROK1_{name.upper()}") or parameters.get(name)
