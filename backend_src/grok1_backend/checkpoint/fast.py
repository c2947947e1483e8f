"""The fast format: a directory of safetensors files and a manifest that makes them valid.

Arrays are named as their leaf, or `<leaf>.weight` and `<leaf>.scales` where it is int8.
`manifest.json` lists the files with their sizes and SHA-256 sums, and is written last: without
it there is no checkpoint. While a conversion runs, `manifest.json.partial` lists what is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grok1_backend.checkpoint.arrays import ArrayRef, CheckpointError, LeafRef
from grok1_backend.checkpoint.safetensors import read_header

MANIFEST = "manifest.json"
PARTIAL = "manifest.json.partial"
_FORMAT = "grok1-safetensors-1"


@dataclass(frozen=True)
class FileEntry:
    """A finished file."""

    name: str
    bytes: int
    sha256: str

    def matches(self, directory: Path) -> bool:
        """Whether the file is there and has this content; reads all of it."""
        path = directory / self.name
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


@dataclass(frozen=True)
class Manifest:
    """What a directory holds, and what it was made from."""

    source: str
    """A digest that tells one conversion from another."""
    files: tuple[FileEntry, ...]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises: CheckpointError: the file is missing or is no manifest."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ValueError(f"expected the format {_FORMAT}, found {fields['format']!r}")
            return cls(fields["source"], tuple(FileEntry(**entry) for entry in fields["files"]))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not a manifest: {error}") from error

    def write(self, path: Path) -> None:
        """Puts the manifest in place at once: there is the old one, or the new, on the disk."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        new = path.with_name(path.name + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        replace(new, path)


def replace(source: Path, target: Path) -> None:
    """Renames a file whose content is on the disk already, and waits for the name to be."""
    source.replace(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_fast(directory: Path) -> bool:
    """Whether the directory holds a conversion, finished or not."""
    return (directory / MANIFEST).exists() or (directory / PARTIAL).exists()


def array_names(name: str, leaf: LeafRef) -> dict[str, ArrayRef]:
    """The arrays of a leaf under their names in this format."""
    if leaf.scales is None:
        return {name: leaf.weight}
    return {f"{name}.weight": leaf.weight, f"{name}.scales": leaf.scales}


def read_leaves(directory: Path, names: Sequence[str]) -> dict[str, LeafRef]:
    """Locates the leaves, given all their names. Reads no array and checks no sum.

    Raises:
      CheckpointError: the conversion is unfinished, a file is missing, extra, or of another size
        than the manifest's, or a tensor is missing or extra.
    """
    if not (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory}: expected {MANIFEST}, found {PARTIAL}: the conversion did not finish; "
            "run it again"
        )
    entries = Manifest.read(directory / MANIFEST).files
    found = {path.name for path in directory.glob("*.safetensors")}
    for name in sorted(found.difference(entry.name for entry in entries)):
        raise CheckpointError(f"{directory / name}: expected the files of {MANIFEST}, found this")
    arrays: dict[str, ArrayRef] = {}
    for entry in entries:
        path = directory / entry.name
        if path.is_file() and path.stat().st_size != entry.bytes:
            raise CheckpointError(
                f"{path}: expected {entry.bytes} bytes, found {path.stat().st_size}"
            )
        for name, ref in read_header(path).items():
            if name in arrays:
                raise CheckpointError(f"{path}: {name}: found in {arrays[name].path.name}, too")
            arrays[name] = ref
    return _leaves(directory, names, arrays)


def _leaves(
    directory: Path, names: Sequence[str], arrays: Mapping[str, ArrayRef]
) -> dict[str, LeafRef]:
    left = dict(arrays)
    leaves = {}
    for name in names:
        weight = left.pop(name, None)
        scales = None
        if weight is None:
            weight, scales = left.pop(f"{name}.weight", None), left.pop(f"{name}.scales", None)
            if weight is None or scales is None:
                raise CheckpointError(f"{directory}: expected the tensor {name}, found none")
        leaves[name] = LeafRef(weight, scales)
    for name, ref in left.items():
        raise CheckpointError(
            f"{ref.path}: expected the {len(names)} tensors of the config, found {name} beside them"
        )
    return leaves
