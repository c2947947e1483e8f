"""Run by test_loading.py in processes of their own, since the number of host devices is fixed
when JAX starts: loads golden checkpoints onto meshes and compares with what was put there whole.

Usage: loading_on_devices.py one | loading_on_devices.py two PORT PROCESS
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from checkpoint_files import GOLDEN, golden_arrays, golden_config

from grok1_backend.checkpoint.convert import convert
from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.kernels import native
from grok1_backend.model.parameters import leaves, place_parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.model.quantization import BlockedWeight, QuantizedWeight8bit


def golden_parameters(checkpoint: str) -> dict[str, Any]:
    """A golden checkpoint's values under their leaf names, from the npz beside it."""
    arrays = golden_arrays(checkpoint)
    named: dict[str, Any] = {}
    for leaf in leaves(golden_config()):
        if leaf.quantized:
            scales = arrays[f"{leaf.name}.scales"].astype(ml_dtypes.bfloat16)
            named[leaf.name] = QuantizedWeight8bit(arrays[f"{leaf.name}.weight"], scales)
        else:
            named[leaf.name] = arrays[leaf.name]
    return named


def assert_same(loaded: jax.Array, expected: jax.Array) -> None:
    assert loaded.dtype == expected.dtype
    assert loaded.shape == expected.shape
    assert loaded.sharding == expected.sharding
    for here, there in zip(loaded.addressable_shards, expected.addressable_shards, strict=True):
        assert here.device == there.device
        np.testing.assert_array_equal(np.asarray(here.data), np.asarray(there.data))


def check(
    checkpoint: str, mesh: jax.sharding.Mesh, run_bytes: int | None, folder: Path = GOLDEN
) -> int:
    """Loads, compares, and returns the bytes that this process read."""
    config = golden_config()
    seen: list[tuple[int, int]] = []
    loaded = load_parameters(
        folder / checkpoint,
        config,
        mesh,
        lambda *progress: seen.append(progress),
        run_bytes=run_bytes,
    )
    expected = place_parameters(golden_parameters(checkpoint), config, mesh)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    jax.tree.map(assert_same, loaded, expected)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    return seen[-1][1]


def check_blocks(checkpoint: str, mesh: jax.sharding.Mesh) -> bool:
    """Whether weights come in blocks; then each shard's are those of its own rows and columns."""
    config = golden_config()
    rows = load_parameters(GOLDEN / checkpoint, config, mesh)
    loaded = load_parameters(GOLDEN / checkpoint, config, mesh, activations=jnp.float32)
    blocked = {name for name, stack in loaded.items() if isinstance(stack, BlockedWeight)}
    assert blocked in (set(), {leaf.stack for leaf in leaves(config) if leaf.quantized})
    for name, found in loaded.items():
        expected = rows[name]
        if isinstance(found, BlockedWeight):
            assert isinstance(found.stored, QuantizedWeight8bit)
            assert isinstance(expected, QuantizedWeight8bit)
            groups = expected.scales.sharding.shard_shape(expected.scales.shape)[-2]
            for here, there in zip(
                found.stored.weight.addressable_shards,
                expected.weight.addressable_shards,
                strict=True,
            ):
                matrices = np.array(there.data)
                native.to_blocks(matrices, groups)
                np.testing.assert_array_equal(np.asarray(here.data), matrices)
            found, expected = found.stored.scales, expected.scales
        jax.tree.map(assert_same, found, expected)
    return bool(blocked)


def one_process(scratch: Path) -> None:
    for checkpoint in ("ckpt-0", "q8g2/ckpt-0"):
        convert(GOLDEN / checkpoint, scratch / checkpoint, golden_config())
        check(checkpoint, create_mesh((1, 8)), None, scratch)
    for data, model in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)]:
        mesh = create_mesh((data, model))
        for checkpoint in ("ckpt-0", "q8g2/ckpt-0"):
            check(checkpoint, mesh, None)  # each stack in one piece
    check("q8g2/ckpt-0", create_mesh((2, 4)), 1)  # layer by layer
    if native.available(jnp.float32):
        assert check_blocks("ckpt-0", create_mesh((1, 1)))
        assert check_blocks("q8g2/ckpt-0", create_mesh((2, 4)))
    assert not check_blocks("ckpt-0", create_mesh((1, 8)))
    # Two of three layers would fit: runs are equal, so one at a time.
    check("ckpt-0", create_mesh((1, 8)), 100_000)


def two_processes(port: str, process: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = create_mesh((1, 4), (1, 2))
    whole = sum(path.stat().st_size for path in (GOLDEN / "ckpt-0").iterdir())
    for run_bytes in (None, 1):
        read = check("ckpt-0", mesh, run_bytes)
        assert read < 0.55 * whole, (read, whole)  # its half, and the norms


if __name__ == "__main__":
    if sys.argv[1] == "one":
        with tempfile.TemporaryDirectory() as scratch:
            one_process(Path(scratch))
    else:
        two_processes(sys.argv[2], int(sys.argv[3]))
    print("same", Path(__file__).name)
