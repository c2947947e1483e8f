"""A directory in the released checkpoint's layout: one pickle a leaf, no names inside.

`tensor{i:05d}_{host:03d}` holds leaf `i` of the parameters, counted in the order of their sorted
names (so layers go 0, 1, 10, 11, ...), and `host` says which host's shard it is: a checkpoint
that a single host wrote, as the released one, has `_000` only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from grok1_backend.checkpoint.arrays import CheckpointError, LeafRef
from grok1_backend.checkpoint.pickling import write_leaf
from grok1_backend.checkpoint.unpickle import read_leaf

_FILE = re.compile(r"tensor(\d{5})_(\d{3})")


def file_name(index: int) -> str:
    """The file of leaf `index`."""
    return f"tensor{index:05d}_000"


def is_released(directory: Path) -> bool:
    """Whether the directory holds any file of this layout."""
    return directory.is_dir() and any(_FILE.fullmatch(path.name) for path in directory.iterdir())


def read_leaves(directory: Path, names: Sequence[str]) -> dict[str, LeafRef]:
    """Locates the leaves, given all their names, in sorted order. Reads no array.

    Raises:
      CheckpointError: a file is missing, extra, another host's, or holds no leaf.
    """
    found = {path.name for path in directory.iterdir() if path.name.startswith("tensor")}
    expected = [file_name(index) for index in range(len(names))]
    for other in sorted(found.difference(expected)):
        match = _FILE.fullmatch(other)
        if match and match[2] != "000":
            raise CheckpointError(
                f"{directory / other}: a shard of host {int(match[2])}: expected a checkpoint "
                "that a single host wrote (files _000 only)"
            )
        raise CheckpointError(
            f"{directory / other}: expected {len(names)} tensors, the last being {expected[-1]}, "
            "found this one beside them"
        )
    for file, name in zip(expected, names, strict=True):
        if file not in found:
            raise CheckpointError(f"{directory / file}: expected {name}, found no such file")
    with ThreadPoolExecutor(16) as pool:
        leaves = pool.map(read_leaf, [directory / file for file in expected])
        return dict(zip(names, leaves, strict=True))


def save_parameters(directory: str | Path, parameters: Mapping[str, Any]) -> None:
    """Writes parameters in the released layout.

    The files appear in `directory` all at once, when the last is written: an interrupted write
    leaves a directory `….partial` beside it.

    Args:
      directory: where; it must not exist or be empty.
      parameters: a mapping of names to leaves or to further mappings, such as Haiku's
        `{"transformer/decoder_layer_0/router": {"w": array}}`. A leaf is a float array, stored as
        float32, or a `QuantizedWeight8bit` (or anything with int8 `weight` and `scales`).

    Raises:
      FileExistsError: the directory holds something.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty")
    partial = directory.with_name(directory.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for index, (_, leaf) in enumerate(sorted(flatten(parameters).items())):
        _save_leaf(partial / file_name(index), leaf)
    partial.replace(directory)


def flatten(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested mappings, by their names joined with `/`."""
    leaves: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            inner = flatten(value)
            leaves.update({f"{name}/{rest}": leaf for rest, leaf in inner.items()})
        else:
            leaves[name] = value
    return leaves


def _save_leaf(path: Path, leaf: Any) -> None:
    if hasattr(leaf, "scales"):
        scales = np.asarray(leaf.scales)
        write_leaf(path, np.asarray(leaf.weight), scales)
    else:
        write_leaf(path, np.asarray(leaf, np.float32))
