"""Compiles the steps of the released model for 8 H100s, without one, and says what came out.

    pip install "jax-cuda12-plugin[with-cuda]"    # of jax's version, 0.12 or later; no GPU needed
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/gpu_programs.py

Of each step: the kernels that one layer runs one after the other, the graphs they are launched in,
all-reduces, and temporary memory beside what the plan has for it. A kernel that spills registers
is an error.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DUMP = tempfile.mkdtemp()
# Before JAX is imported, as XLA reads it once.
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxlib.version  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from grok1_backend.engine import programs  # noqa: E402
from grok1_backend.engine.compiler_options import PINNED  # noqa: E402
from grok1_backend.engine.decode_state import initial_state  # noqa: E402
from grok1_backend.engine.memory_plan import shown, step_bytes  # noqa: E402
from grok1_backend.kernels import choice, native  # noqa: E402
from grok1_backend.model import steps  # noqa: E402
from grok1_backend.model.config import load_config  # noqa: E402
from grok1_backend.model.parameters import abstract_parameters  # noqa: E402

CONFIG = load_config("grok1-314b")
GPUS, SLOTS, PAGE_SIZE, PAGES = 8, 32, 64, 4096
STEPS = (("decode", 1, 1), ("decode", 32, 1), ("prefill", 1, 512), ("prefill", 1, 2048))

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


def arguments_on(mesh: Mesh, parameters: Any) -> programs.AbstractArguments:
    def whole(array: Any) -> Any:
        sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    heads = max(GPUS, CONFIG.num_kv_heads)
    shape = (CONFIG.num_layers, PAGES, PAGE_SIZE, heads, CONFIG.key_size)
    pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, steps.POOL_SPEC))
    state = jax.eval_shape(lambda: initial_state(SLOTS, CONFIG.vocab_size))
    runner: Any = SimpleNamespace(
        vocab_size=CONFIG.vocab_size, context_length=CONFIG.sequence_len, page_size=PAGE_SIZE
    )
    pool: Any = steps.KVPool(pages, pages)
    state = jax.tree.map(whole, state)
    return programs.AbstractArguments.of(runner, mesh, parameters, pool, state)


def schedule() -> str:
    """What the program that was compiled last does, in order, and removes it."""
    (path,) = Path(DUMP).glob("*jit_*.thunk_sequence_after_thunk_passes.txt")
    text = path.read_text(encoding="utf-8")
    path.unlink()
    return text


def main() -> None:
    choice.on_gpu = lambda: True
    native.available = lambda _: False
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x1x{GPUS}"
    )
    mesh = Mesh(np.array(topology.devices).reshape(1, GPUS), ("data", "model"))
    parameters = abstract_parameters(CONFIG, mesh)
    functions = programs.build(CONFIG, parameters, mesh, jnp.dtype(jnp.bfloat16))
    arguments = arguments_on(mesh, parameters)
    options = {
        **PINNED[jaxlib.version.__version__],
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    }
    for kind, rows, tokens in STEPS:
        sizes = (rows,) if kind == "decode" else (rows, tokens)
        lowered = getattr(functions, kind).lower(*getattr(arguments, kind)(*sizes))
        memory = lowered.compile(compiler_options=options).memory_analysis()
        _, layer = schedule().split("body:")
        layer = "\n".join(line for line in layer.splitlines() if line.startswith(" "))
        counts = {
            name: len(re.findall(rf": {thunk} ", layer))
            for name, thunk in (
                ("kernels", "kCustomKernel"),
                ("copies", "kCopy"),
                ("all-reduces", "kAllReduce"),
                ("graphs", "kCommandBuffer"),
            )
        }
        planned = step_bytes(CONFIG, GPUS, rows, tokens, 2)
        print(
            f"{kind} of {rows} x {tokens}: a layer has "
            + ", ".join(f"{count} {name}" for name, count in counts.items())
            + f"; {shown(memory.temp_size_in_bytes)} temporary, {shown(planned)} planned",
            flush=True,
        )


if __name__ == "__main__":
    main()
