"""How fast a checkpoint loads, against `cat` of the same files, and how much memory that takes.

    python benchmarks/checkpoint_loading.py --gigabytes 2

Generates an int8 checkpoint of random weights, converts it to the fast format, and loads both,
cold (the files' pages dropped from the page cache) and warm, each in a new process whose peak of
resident memory is measured from just before the load. On CPU that peak includes the parameters
themselves, and new memory costs time as well, which `cat` does not pay: `read` shows it, one
thread that reads the files one after another into new memory. Each is done several times in turn,
and the fastest counts. Everything is written to a temporary directory and deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from grok1_backend.checkpoint.convert import convert
from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.checkpoint.pickling import write_leaf
from grok1_backend.checkpoint.released import file_name
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import leaves
from grok1_backend.model.partition import create_mesh


def config_of(gigabytes: float) -> GrokConfig:
    """A model of about so much int8: a sixth of Grok-1's width, and as many layers as it takes."""
    one_layer = GrokConfig(
        vocab_size=1024,
        sequence_len=128,
        emb_size=1024,
        num_layers=1,
        num_q_heads=8,
        num_kv_heads=8,
        key_size=128,
        widening_factor=8,
        num_experts=8,
        num_selected_experts=2,
        embedding_multiplier_scale=1.0,
        output_multiplier_scale=1.0,
        attn_output_multiplier=1.0,
    )
    layer = sum(np.prod(leaf.shape) for leaf in leaves(one_layer) if leaf.quantized)
    return dataclasses.replace(one_layer, num_layers=max(1, round(gigabytes * 1e9 / layer)))


def generate(directory: Path, config: GrokConfig) -> None:
    """Writes random weights in the released layout, with 8 scale groups where it has them."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index, leaf in enumerate(leaves(config)):
        path = directory / file_name(index)
        if leaf.quantized:
            groups = 8 if "linear_1" in leaf.name or "attention/linear" in leaf.name else 1
            scales = np.ones((*leaf.shape[:-2], groups, leaf.shape[-1]), ml_dtypes.bfloat16)
            write_leaf(path, rng.integers(-127, 128, leaf.shape, np.int8), scales)
        else:
            write_leaf(path, rng.standard_normal(leaf.shape, np.float32))


def drop_from_page_cache(directory: Path) -> None:
    """Makes the next read of these files cold, and of no others; needs no privilege."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages are dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cat(directory: Path) -> float:
    """Seconds of `cat` of all files, one after another."""
    start = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        paths = [str(path) for path in sorted(directory.iterdir())]
        subprocess.run(["cat", *paths], check=True, stdout=nowhere)
    return time.perf_counter() - start


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def load_here(
    directory: Path, config: GrokConfig, devices: int, run_bytes: int | None
) -> dict[str, Any]:
    """Loads in this process: seconds, and bytes of memory."""
    import jax

    mesh = create_mesh((1, devices))
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = resident("VmRSS")
    start = time.perf_counter()
    parameters = load_parameters(directory, config, mesh, run_bytes=run_bytes)
    jax.block_until_ready(parameters)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "parameter_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(parameters)),
        "peak_bytes": resident("VmHWM") - before,
    }


def read_here(directory: Path) -> dict[str, Any]:
    """Reads all files into new memory, in this process and thread."""
    start = time.perf_counter()
    contents = [np.fromfile(path, np.uint8) for path in sorted(directory.iterdir())]
    return {"seconds": time.perf_counter() - start, "bytes": sum(map(len, contents))}


def in_new_process(what: str, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """`load_here` or `read_here`, with memory that was not used before."""
    child = [sys.executable, __file__, f"--{what}", str(directory)]
    child += ["--gigabytes", str(arguments.gigabytes), "--devices", str(arguments.devices)]
    if arguments.run_bytes:
        child += ["--run-bytes", str(arguments.run_bytes)]
    flags = f"--xla_force_host_platform_device_count={arguments.devices}"
    environment = {"XLA_FLAGS": flags, **os.environ}
    output = subprocess.run(child, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    result: dict[str, Any] = json.loads(output.stdout)
    return result


def prepare(directory: Path, config: GrokConfig) -> Iterator[dict[str, Any]]:
    """Writes the checkpoint in both formats."""
    start = time.perf_counter()
    generate(directory / "released", config)
    size = sum(path.stat().st_size for path in (directory / "released").iterdir())
    yield {"what": "generate", "bytes": size, "seconds": time.perf_counter() - start}
    start = time.perf_counter()
    convert(directory / "released", directory / "fast", config)
    yield {"what": "convert", "bytes": size, "seconds": time.perf_counter() - start}


def measure(directory: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each of cat, read and load, of files that are not in the page cache, or are."""
    size = sum(path.stat().st_size for path in directory.iterdir())
    for state in ("cold", "warm"):
        rows: dict[str, list[dict[str, Any]]] = {"cat": [], "read": [], "load": []}
        for _ in range(arguments.repeats):
            for what, results in rows.items():
                if state == "cold":
                    drop_from_page_cache(directory)
                if what == "cat":
                    results.append({"seconds": cat(directory)})
                else:
                    results.append(in_new_process(what, directory, arguments))
        for what, results in rows.items():
            name = f"{what} {directory.name}, {state}"
            yield {"what": name, "bytes": size, **min(results, key=lambda row: row["seconds"])}


def line(row: dict[str, Any]) -> str:
    text = f"{row['what']:22} {row['bytes'] / 1e9:6.2f} GB {row['seconds']:7.2f} s"
    text += f" {row['bytes'] / row['seconds'] / 1e9:6.2f} GB/s"
    if "peak_bytes" in row:
        text += f"   peak {row['peak_bytes'] / 1e9:.2f} GB"
        text += f" for {row['parameter_bytes'] / 1e9:.2f} GB of parameters"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--devices", type=int, default=1, help="model shards (host devices on CPU)")
    parser.add_argument("--directory", type=Path, help="where to write (a disk, not tmpfs)")
    parser.add_argument("--run-bytes", type=int, help="of load_parameters (default: its own)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    for what in ("load", "read"):  # what the child processes do
        parser.add_argument(f"--{what}", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = config_of(arguments.gigabytes)
    if arguments.load:
        print(json.dumps(load_here(arguments.load, config, arguments.devices, arguments.run_bytes)))
    elif arguments.read:
        print(json.dumps(read_here(arguments.read)))
    else:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            rows = itertools.chain(
                prepare(Path(name), config),
                measure(Path(name) / "released", arguments),
                measure(Path(name) / "fast", arguments),
            )
            for row in rows:
                print(json.dumps(row) if arguments.json else line(row), flush=True)


if __name__ == "__main__":
    main()
