"""Converts a checkpoint to the fast format; an interrupted conversion is taken up again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from grok1_backend.checkpoint.arrays import ArrayRef, CheckpointError, LeafRef
from grok1_backend.checkpoint.checkpoint import open_checkpoint
from grok1_backend.checkpoint.fast import (
    MANIFEST,
    PARTIAL,
    FileEntry,
    Manifest,
    array_names,
    replace,
)
from grok1_backend.checkpoint.progress import Progress
from grok1_backend.checkpoint.reading import stored_bytes
from grok1_backend.checkpoint.safetensors import header
from grok1_backend.model.config import GrokConfig

FILE_BYTES = 4 * 2**30
"""The most data in one file, unless one tensor alone has more."""
_THREADS = 4


def convert(
    source: str | Path,
    target: str | Path,
    config: GrokConfig,
    progress: Progress | None = None,
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a checkpoint (of either format) in the fast format, bit for bit the same values.

    Interrupted, it leaves nothing that can be loaded. Run again, it keeps every finished file
    whose SHA-256 sum is right, and so also checks or repairs a finished conversion.

    Args:
      target: a directory: empty, not there yet, or begun by the same conversion.
      progress: called with the bytes written or found right so far, and all there are.

    Raises:
      CheckpointError: the source cannot be read (then nothing was written), or the target holds
        something else.
    """
    plan = _plan(open_checkpoint(source, config), file_bytes)
    directory = Path(target)
    directory.mkdir(parents=True, exist_ok=True)
    manifest = _begin(directory, _identity(plan))
    work = _Conversion(directory, progress, sum(file.nbytes for file in plan))
    done = {entry.name: entry for entry in manifest.files}
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            checks = {pool.submit(work.is_right, file, done.get(file.name)): file for file in plan}
            right = {checks[check].name for check in as_completed(checks) if check.result()}
            if len(right) == len(plan) and (directory / MANIFEST).exists():
                return
            entries = {name: done[name] for name in right}
            if (directory / MANIFEST).exists():  # damaged: no longer valid until repaired
                replace(directory / MANIFEST, directory / PARTIAL)
            writes = [pool.submit(work.write, file) for file in plan if file.name not in right]
            for write in as_completed(writes):
                entries[write.result().name] = write.result()
                files = tuple(entries[name] for name in sorted(entries))
                Manifest(manifest.source, files).write(directory / PARTIAL)
        finally:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
    replace(directory / PARTIAL, directory / MANIFEST)


@dataclass(frozen=True)
class _File:
    """A file to be written."""

    name: str
    arrays: dict[str, ArrayRef]

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.arrays.values())


def _plan(leaves: Mapping[str, LeafRef], file_bytes: int) -> list[_File]:
    """Fills files in the order of the leaves; a leaf's weight and scales stay together."""
    groups: list[dict[str, ArrayRef]] = []
    size = 0
    for name, leaf in leaves.items():
        if not groups or size + leaf.nbytes > file_bytes:
            groups.append({})
            size = 0
        groups[-1].update(array_names(name, leaf))
        size += leaf.nbytes
    return [
        # The widest elements first: so every array is aligned to its elements.
        _File(
            f"parameters-{place:05d}-of-{len(groups):05d}.safetensors",
            dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)),
        )
        for place, group in enumerate(groups, 1)
    ]


def _identity(plan: list[_File]) -> str:
    """A digest of what goes where, and of the source files' sizes and times of change."""
    digest = hashlib.sha256()
    for file in plan:
        for name, ref in file.arrays.items():
            stat = ref.path.stat()
            found = (file.name, name, ref.path.name, ref.offset, stat.st_size, stat.st_mtime_ns)
            digest.update(repr(found).encode())
    return digest.hexdigest()


def _begin(directory: Path, source: str) -> Manifest:
    """What an earlier run of this conversion has done; the target is ours from here on."""
    for name in (MANIFEST, PARTIAL):
        if (directory / name).exists():
            manifest = Manifest.read(directory / name)
            if manifest.source != source:
                raise CheckpointError(
                    f"{directory / name}: expected an earlier run of this conversion, found "
                    "another one (or the source has changed): choose an empty directory"
                )
            return manifest
    if any(directory.iterdir()):
        raise CheckpointError(f"{directory}: expected an empty directory, found files in it")
    manifest = Manifest(source, ())
    manifest.write(directory / PARTIAL)
    return manifest


class _Conversion:
    """The work of the threads."""

    def __init__(self, directory: Path, progress: Progress | None, total: int) -> None:
        self.stop = threading.Event()
        """Set when a file that is being written is no longer wanted."""
        self._directory = directory
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def is_right(self, file: _File, entry: FileEntry | None) -> bool:
        """Whether the file was finished and is intact."""
        if entry is None or not entry.matches(self._directory):
            return False
        self._advance(file.nbytes)
        return True

    def write(self, file: _File) -> FileEntry:
        """Writes the file under another name, and gives it its own when it is on the disk."""
        path = self._directory / file.name
        new = path.with_name(path.name + ".new")
        digest = hashlib.sha256()
        try:
            with new.open("wb") as out:
                for data in self._content(file):
                    out.write(data)
                    digest.update(data)
                out.flush()
                os.fsync(out.fileno())
                size = out.tell()
            replace(new, path)
        except OSError as error:
            raise CheckpointError(f"{new}: {error.strerror}") from error
        return FileEntry(file.name, size, digest.hexdigest())

    def _content(self, file: _File) -> Iterator[bytes | memoryview]:
        yield header(file.arrays)
        for ref in file.arrays.values():
            for data in stored_bytes(ref):
                if self.stop.is_set():
                    raise CancelledError
                yield data
                self._advance(len(data))

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._done, self._total)
