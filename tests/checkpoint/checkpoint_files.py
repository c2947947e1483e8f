"""What the checkpoint tests share: the golden checkpoints and plain reading."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grok1_backend.checkpoint.arrays import Array, ArrayRef, LeafRef
from grok1_backend.model.config import GrokConfig

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden"
GOLDEN_CHECKPOINTS = ("ckpt-0", "q8g2/ckpt-0")

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no ../shared/golden here")


def golden_config() -> GrokConfig:
    """Of the golden checkpoints."""
    values = json.loads((GOLDEN / "config.json").read_text())
    known = {field.name for field in dataclasses.fields(GrokConfig)}
    return GrokConfig(**{name: value for name, value in values.items() if name in known})


def golden_names(checkpoint: str) -> list[str]:
    """The parameter names of a golden checkpoint, in the order of its files."""
    index = json.loads((GOLDEN / checkpoint).parent.joinpath("ckpt_index.json").read_text())
    return [name.removeprefix("params/") for _, name, *_ in index]


def golden_arrays(checkpoint: str) -> dict[str, Array]:
    """Its arrays, as stored apart from it: keys as in params_q8.npz."""
    arrays = dict(np.load(GOLDEN / "params_q8.npz"))
    if checkpoint.startswith("q8g2"):
        arrays |= dict(np.load(GOLDEN / "params_q8g2_delta.npz"))
    return arrays


def read_whole(ref: ArrayRef) -> Array:
    """All of an array, read the plainest way."""
    data = ref.path.read_bytes()[ref.offset : ref.offset + ref.nbytes]
    order: Any = "F" if ref.fortran else "C"
    return np.frombuffer(data, ref.dtype).reshape(ref.shape, order=order)


def read_values(leaf: LeafRef) -> Any:
    """A leaf as the writer takes it."""
    if leaf.scales is None:
        return read_whole(leaf.weight)
    return SimpleNamespace(weight=read_whole(leaf.weight), scales=read_whole(leaf.scales))
