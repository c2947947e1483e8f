"""Compiles the programs of the released model for 8 H100s, without one, and says what came out.

    pip install "jax-cuda12-plugin[with-cuda]"    # of jax's version, 0.12 or later; no GPU needed
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/gpu_programs.py

Of each program: the kernels that one layer (a sampler: the whole) runs one after the other, the
graphs they are launched in, all-reduces, and temporary memory beside what the plan has for a step.
It is an error if a kernel spills registers, or if the host would read a predicate: of a
`conditional`, or of a `while` whose trip count the compiler does not know.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grok1_backend.engine import programs
from grok1_backend.engine.compiler_options import PINNED
from grok1_backend.engine.decode_state import initial_state
from grok1_backend.engine.memory_plan import shown, step_bytes
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.kernels import choice, native
from grok1_backend.model import steps
from grok1_backend.model.attention import KVPool
from grok1_backend.model.config import load_config
from grok1_backend.model.parameters import abstract_parameters

CONFIG = load_config("grok1-314b")
GPUS = 8
SETTINGS = RunnerSettings(
    num_slots=32,
    num_pages=4096,
    decode_rows=(1, 32),
    prefill_rows=(1,),
    prefill_tokens=(512, 2048),
    dtype="bfloat16",
)

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def released_programs(mesh: Mesh | AbstractMesh) -> list[programs.Job]:
    """What the runner would compile on a mesh of shape [1, GPUS] (`data`, `model`)."""

    def whole(array: Any) -> Any:
        sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    runner: Any = SimpleNamespace(
        vocab_size=CONFIG.vocab_size,
        context_length=CONFIG.sequence_len,
        page_size=SETTINGS.page_size,
    )
    on_mesh: Any = mesh  # shapes and shardings are all that is asked of it
    parameters = abstract_parameters(CONFIG, on_mesh)
    heads = max(GPUS, CONFIG.num_kv_heads)
    shape = (CONFIG.num_layers, SETTINGS.num_pages, SETTINGS.page_size, heads, CONFIG.key_size)
    pages: Any = jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, steps.POOL_SPEC)
    )
    state = jax.eval_shape(lambda: initial_state(SETTINGS.num_slots, CONFIG.vocab_size))
    arguments = programs.AbstractArguments.of(
        runner, on_mesh, parameters, KVPool(pages, pages), jax.tree.map(whole, state)
    )
    functions = programs.build(CONFIG, parameters, on_mesh, jnp.dtype(jnp.bfloat16))
    return programs.jobs(SETTINGS, functions, arguments)


def predicates(program: str) -> int:
    """How many predicates of an optimised HLO text the host would read."""
    lines = re.findall(r"^.* (?:while|conditional)\(.*$", program, re.MULTILINE)
    return sum("known_trip_count" not in line for line in lines)


def in_order(schedule: str) -> list[str]:
    """The lines of a schedule that a layer runs; without layers, all."""
    _, *bodies = schedule.split("body:\n")
    lines = (bodies[0] if bodies else schedule).splitlines()
    return list(itertools.takewhile(lambda line: line.startswith(" ") or not bodies, lines))


def planned(job: programs.Job) -> str:
    """What the plan of memory has for a step; nothing for what is no step."""
    kind, *sizes = job.key
    if kind not in ("decode", "prefill", "score"):
        return ""
    rows, tokens = {"decode": (*sizes, 1), "prefill": tuple(sizes), "score": (1, *sizes)}[kind]
    return f", {shown(step_bytes(CONFIG, GPUS, rows, tokens, 2))} planned"


def report(job: programs.Job, dump: Path) -> None:
    """Compiles a program and prints what it is.

    Args:
      dump: where XLA leaves the schedule, which is removed.

    Raises:
      ValueError: the host would read predicates.
    """
    options = {
        **PINNED[jaxlib.version.__version__],
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    }
    compiled = job.function.lower(*job.arguments).compile(compiler_options=options)
    (path,) = dump.glob("*jit_*.thunk_sequence_after_thunk_passes.txt")
    lines = in_order(path.read_text(encoding="utf-8"))
    path.unlink()
    kinds = {
        "kernels": "kCustomKernel",
        "copies": "kCopy",
        "all-reduces": "kAllReduce",
        "graphs": "kCommandBuffer",
    }
    counts = (
        f"{sum(f': {kind} ' in line for line in lines)} {name}" for name, kind in kinds.items()
    )
    temporary = shown(compiled.memory_analysis().temp_size_in_bytes)
    print(f"{job.name}: {', '.join(counts)}; {temporary} temporary{planned(job)}", flush=True)
    if found := predicates(compiled.as_text()):
        raise ValueError(f"the host would read {found} predicates in {job.name}")


def main() -> None:
    dump = Path(tempfile.mkdtemp())
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"  # read by XLA once
    choice.on_gpu = lambda: True
    native.available = lambda _: False
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x1x{GPUS}"
    )
    mesh = Mesh(np.array(topology.devices).reshape(1, GPUS), ("data", "model"))
    for job in released_programs(mesh):
        report(job, dump)


if __name__ == "__main__":
    main()
