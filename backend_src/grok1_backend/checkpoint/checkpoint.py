"""Opens a checkpoint of either format, and checks it against a config before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grok1_backend.checkpoint import fast, released
from grok1_backend.checkpoint.arrays import (
    BFLOAT16,
    FLOAT32,
    INT8,
    CheckpointError,
    DType,
    LeafRef,
)
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import Leaf, leaves


def open_checkpoint(path: str | Path, config: GrokConfig) -> dict[str, LeafRef]:
    """Locates the parameters of a model in a checkpoint of either format.

    Args:
      path: a directory with the files, or one that holds it as `ckpt-0`.

    Returns:
      Leaf name to where its arrays lie, in the order of `leaves(config)`.

    Raises:
      CheckpointError: there is no checkpoint, or a tensor is missing, extra, truncated, or of
        another shape or dtype than the config's; the message names file, expected and found.
    """
    directory = Path(path)
    if (directory / "ckpt-0").is_dir():
        directory = directory / "ckpt-0"
    expected = leaves(config)
    names = [leaf.name for leaf in expected]
    if fast.is_fast(directory):
        found = fast.read_leaves(directory, names)
    elif released.is_released(directory):
        found = released.read_leaves(directory, names)
    else:
        raise CheckpointError(
            f"{directory}: expected a checkpoint (tensor00000_000, ... or {fast.MANIFEST}), "
            "found none"
        )
    for leaf in expected:
        _check_leaf(leaf, found[leaf.name])
    _check_stacks(expected, found)
    return found


def _check_leaf(leaf: Leaf, found: LeafRef) -> None:
    """Shape and dtype of one leaf."""
    weight, scales = found.weight, found.scales
    if scales is None:
        shown = _shown("float32", leaf.shape) + (" or int8" if leaf.quantized else "")
        _expect(leaf, found, weight.dtype == FLOAT32 and weight.shape == leaf.shape, shown)
        return
    shown = _shown("int8" if leaf.quantized else "float32", leaf.shape)
    _expect(
        leaf,
        found,
        leaf.quantized and weight.dtype == INT8 and weight.shape == leaf.shape,
        shown,
    )
    *lead, rows, columns = leaf.shape
    groups = scales.shape[-2] if len(scales.shape) == len(leaf.shape) else 0
    fits = scales.shape == (*lead, groups, columns) and groups > 0 and rows % groups == 0
    shown += f" with scales bfloat16 {[*lead, 'groups', columns]}, groups dividing {rows}"
    _expect(leaf, found, fits and scales.dtype in (BFLOAT16, FLOAT32), shown)


def _expect(leaf: Leaf, found: LeafRef, right: bool, shown: str) -> None:
    if not right:
        arrays = " with scales ".join(_shown(ref.dtype, ref.shape) for ref in found.arrays)
        raise CheckpointError(f"{found.weight.path}: {leaf.name}: expected {shown}, found {arrays}")


def _shown(dtype: DType | str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _check_stacks(expected: list[Leaf], found: Mapping[str, LeafRef]) -> None:
    """All layers of a kind are stored alike, since they become one array."""
    first: dict[str, Leaf] = {}
    for leaf in expected:
        other = first.setdefault(leaf.stack, leaf)
        here, there = found[leaf.name], found[other.name]
        alike = [(ref.dtype, ref.shape) for ref in there.arrays]
        shown = " with scales ".join(_shown(*pair) for pair in alike) + f", as {other.name}"
        _expect(leaf, here, [(ref.dtype, ref.shape) for ref in here.arrays] == alike, shown)
