"""The fast format: bit for bit the same values, and valid only when it is whole."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from checkpoint_files import (
    GOLDEN,
    GOLDEN_CHECKPOINTS,
    golden_config,
    needs_golden,
    read_values,
    read_whole,
)

from grok1_backend.checkpoint.arrays import CheckpointError
from grok1_backend.checkpoint.checkpoint import open_checkpoint
from grok1_backend.checkpoint.cli import add_arguments, run
from grok1_backend.checkpoint.convert import convert
from grok1_backend.checkpoint.fast import MANIFEST, PARTIAL
from grok1_backend.checkpoint.released import save_parameters
from grok1_backend.errors import UserError

pytestmark = needs_golden
SOURCE = GOLDEN / "ckpt-0"
FILE_BYTES = 100_000  # about 7 files


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    target = tmp_path_factory.mktemp("converted") / "fast"
    convert(SOURCE, target, golden_config(), file_bytes=FILE_BYTES)
    return target


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """To be broken."""
    return Path(shutil.copytree(converted, tmp_path / "fast"))


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("checkpoint", GOLDEN_CHECKPOINTS)
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, checkpoint: str) -> None:
    convert(GOLDEN / checkpoint, tmp_path / "fast", golden_config(), file_bytes=FILE_BYTES)
    leaves = open_checkpoint(tmp_path / "fast", golden_config())
    save_parameters(tmp_path / "back", {name: read_values(leaf) for name, leaf in leaves.items()})
    for path in (GOLDEN / checkpoint).iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_converting_a_conversion_changes_only_the_files(converted: Path, tmp_path: Path) -> None:
    convert(converted, tmp_path / "one", golden_config())
    assert len(files(tmp_path / "one")) == 1
    first = open_checkpoint(converted, golden_config())
    second = open_checkpoint(tmp_path / "one", golden_config())
    for name, leaf in first.items():
        for here, there in zip(leaf.arrays, second[name].arrays, strict=True):
            np.testing.assert_array_equal(read_whole(here), read_whole(there))


def test_transposed_source(tmp_path: Path) -> None:
    """An array stored with its first axis fastest comes out with its last axis fastest."""
    shutil.copytree(SOURCE, tmp_path / "source", copy_function=shutil.copyfile)
    router = np.arange(32 * 8, dtype=np.float32).reshape(8, 32).T
    (tmp_path / "source").chmod(0o755)
    (tmp_path / "source" / "tensor00013_000").write_bytes(pickle.dumps(router, protocol=4))
    convert(tmp_path / "source", tmp_path / "fast", golden_config())
    leaf = open_checkpoint(tmp_path / "fast", golden_config())[
        "transformer/decoder_layer_0/router/w"
    ]
    assert not leaf.weight.fortran
    np.testing.assert_array_equal(read_whole(leaf.weight), router)


def test_files_are_bounded_aligned_and_read_by_the_safetensors_library(converted: Path) -> None:
    names: set[str] = set()
    for path in files(converted):
        assert path.stat().st_size < FILE_BYTES + 4096
        with safetensors.safe_open(path, "numpy") as file:
            names.update(file.keys())
    assert "transformer/decoder_layer_2/moe/linear/w.scales" in names
    for leaf in open_checkpoint(converted, golden_config()).values():
        for ref in leaf.arrays:
            assert ref.offset % ref.dtype.itemsize == 0


def test_manifest_holds_the_sums_that_sha256sum_prints(converted: Path) -> None:
    manifest = json.loads((converted / MANIFEST).read_text())
    assert [entry["name"] for entry in manifest["files"]] == [
        path.name for path in files(converted)
    ]
    for entry in manifest["files"]:
        data = (converted / entry["name"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["bytes"] == len(data)
    assert not (converted / PARTIAL).exists()
    assert not list(converted.glob("*.new"))


class Stop(BaseException):
    """As KeyboardInterrupt."""


def stopping_at(share: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    return progress


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in files(directory)}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95, 1.0])
def test_interrupted_and_resumed(tmp_path: Path, converted: Path, share: float) -> None:
    target = tmp_path / "fast"
    with pytest.raises(Stop):
        convert(SOURCE, target, golden_config(), stopping_at(share), file_bytes=FILE_BYTES)
    with pytest.raises(CheckpointError, match="did not finish; run it again"):
        open_checkpoint(target, golden_config())
    finished = {entry["name"] for entry in json.loads((target / PARTIAL).read_text())["files"]}
    before = stamps(target)
    assert finished <= set(before)
    convert(SOURCE, target, golden_config(), file_bytes=FILE_BYTES)
    after = stamps(target)
    assert all(before[name] == after[name] for name in finished), "a finished file was rewritten"
    assert_same_files(target, converted)


def assert_same_files(target: Path, other: Path) -> None:
    assert sorted(path.name for path in target.iterdir()) == sorted(
        path.name for path in other.iterdir()
    )
    for path in target.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_killed_and_resumed(tmp_path: Path, converted: Path) -> None:
    """As by the kernel: no handler of ours runs."""
    program = (
        "import os, sys; from checkpoint_files import golden_config;"
        "from grok1_backend.checkpoint.convert import convert;"
        "kill = lambda done, total: done > 0.7 * total and os.kill(os.getpid(), 9);"
        f"convert(sys.argv[1], sys.argv[2], golden_config(), kill, file_bytes={FILE_BYTES})"
    )
    target = tmp_path / "fast"
    killed = subprocess.run(
        [sys.executable, "-c", program, str(SOURCE), str(target)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    assert killed.returncode == -9
    with pytest.raises(CheckpointError, match="did not finish; run it again"):
        open_checkpoint(target, golden_config())
    convert(SOURCE, target, golden_config(), file_bytes=FILE_BYTES)
    assert_same_files(target, converted)


def test_run_again_repairs_a_damaged_file(copy: Path, converted: Path) -> None:
    before = stamps(copy)
    damaged = files(copy)[2]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    open_checkpoint(copy, golden_config())  # loading checks no sums
    reported: list[tuple[int, int]] = []
    convert(SOURCE, copy, golden_config(), lambda *p: reported.append(p), file_bytes=FILE_BYTES)
    assert_same_files(copy, converted)
    assert reported[-1][0] == reported[-1][1]
    rewritten = {name for name, inode in stamps(copy).items() if inode != before[name]}
    assert rewritten == {damaged.name}


def test_interrupted_repair_is_not_valid(copy: Path) -> None:
    files(copy)[0].unlink()
    with pytest.raises(Stop):
        convert(SOURCE, copy, golden_config(), stopping_at(1.0), file_bytes=FILE_BYTES)
    with pytest.raises(CheckpointError, match="did not finish"):
        open_checkpoint(copy, golden_config())


def test_run_again_on_a_whole_one_writes_nothing(copy: Path) -> None:
    before = {path: path.stat() for path in copy.iterdir()}
    convert(SOURCE, copy, golden_config(), file_bytes=FILE_BYTES)
    after = {path: path.stat() for path in copy.iterdir()}
    assert {path: stat.st_mtime_ns for path, stat in before.items()} == {
        path: stat.st_mtime_ns for path, stat in after.items()
    }


def test_disk_error_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"parameters-\S+: File too large"):
            convert(SOURCE, tmp_path / "fast", golden_config(), file_bytes=FILE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(CheckpointError, match="did not finish"):
        open_checkpoint(tmp_path / "fast", golden_config())


def test_target_of_another_conversion_is_refused(copy: Path) -> None:
    for source, size in ((GOLDEN / "q8g2" / "ckpt-0", FILE_BYTES), (SOURCE, 2 * FILE_BYTES)):
        with pytest.raises(CheckpointError, match="found another one"):
            convert(source, copy, golden_config(), file_bytes=size)
    open_checkpoint(copy, golden_config())


def test_target_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="expected an empty directory"):
        convert(SOURCE, tmp_path, golden_config())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_bad_source_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        convert(tmp_path / "empty", tmp_path / "fast", golden_config())
    assert not (tmp_path / "fast").exists()


def manifest(copy: Path, change: Callable[[Any], object]) -> None:
    fields = json.loads((copy / MANIFEST).read_text())
    change(fields)
    (copy / MANIFEST).write_text(json.dumps(fields))


def damage_missing(copy: Path) -> None:
    files(copy)[1].unlink()


def damage_truncated(copy: Path) -> None:
    files(copy)[1].write_bytes(files(copy)[1].read_bytes()[:-1])


def damage_extra_file(copy: Path) -> None:
    shutil.copy(files(copy)[0], copy / "other.safetensors")


def damage_missing_tensors(copy: Path) -> None:
    files(copy)[1].unlink()
    manifest(copy, lambda fields: fields["files"].pop(1))


def damage_doubled_tensors(copy: Path) -> None:
    shutil.copy(files(copy)[0], copy / "other.safetensors")
    manifest(
        copy,
        lambda fields: fields["files"].append(fields["files"][0] | {"name": "other.safetensors"}),
    )


def damage_json(copy: Path) -> None:
    (copy / MANIFEST).write_text("{")


def damage_version(copy: Path) -> None:
    manifest(copy, lambda fields: fields.update(format="grok1-safetensors-2"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_missing, r"parameters-00002-of-\d+\.safetensors: No such file"),
        (damage_truncated, r"parameters-00002-of-\d+\.safetensors: expected \d+ bytes, found \d+"),
        (damage_extra_file, r"other\.safetensors: expected the files of manifest\.json"),
        (damage_missing_tensors, r"expected the tensor transformer/\S+, found none"),
        (damage_doubled_tensors, r"other\.safetensors: \S+: found in parameters-00001-of"),
        (damage_json, r"manifest\.json: not a manifest"),
        (damage_version, r"expected the format grok1-safetensors-1, found 'grok1-safetensors-2'"),
    ],
)
def test_damaged(copy: Path, damage: Callable[[Path], None], why: str) -> None:
    damage(copy)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(copy, golden_config())


def test_extra_tensors_of_a_larger_model(converted: Path) -> None:
    smaller = dataclasses.replace(golden_config(), num_layers=2)
    with pytest.raises(CheckpointError, match=r"decoder_layer_2/\S+ beside them"):
        open_checkpoint(converted, smaller)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def test_command_line(
    tmp_path: Path,
    converted: Path,
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model directory brings its config; another config can be named."""
    values = dataclasses.asdict(golden_config()).items()
    config = "[model]\n" + "".join(f"{name} = {value}\n" for name, value in values)
    model = tmp_path / "model"
    shutil.copytree(SOURCE, model / "ckpt-0", copy_function=shutil.copy2)
    (model / "config.toml").write_text(config)
    size = ["--file-gib", str(FILE_BYTES / 2**30)]
    run(parser.parse_args([str(model), str(tmp_path / "one"), *size]))
    run(parser.parse_args([str(SOURCE), str(tmp_path / "two"), "--config", str(model), *size]))
    for path in files(converted):
        assert (tmp_path / "one" / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()
    assert "100%" in capsys.readouterr().out


@pytest.mark.parametrize("config", [[], ["--config", "grok2"]])
def test_command_line_without_config(
    tmp_path: Path, parser: argparse.ArgumentParser, config: list[str]
) -> None:
    with pytest.raises(UserError, match="no config"):
        run(parser.parse_args([str(SOURCE), str(tmp_path / "fast"), *config]))
    assert not (tmp_path / "fast").exists()
