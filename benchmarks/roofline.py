"""What a decode step of a model cannot be faster than on 8 GPUs: computed, not measured.

    python benchmarks/roofline.py            # writes its section of docs/performance.md
    python benchmarks/roofline.py --print

Per device: the bytes that a step must read over the memory's bandwidth or its products over the
arithmetic rate, whichever is longer, then two all-reduces a layer, which nothing overlaps as each
needs all that came before. Beside it the same with the time between the kernels of a layer.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grok1_backend.engine.memory_plan import leaf_bytes
from grok1_backend.model.config import GrokConfig, load_config
from grok1_backend.model.parameters import leaves
from grok1_backend.model.sharding import ModelShards

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- roofline -->\n", "<!-- end of roofline -->"

CONFIG = "grok1-314b"
BATCHES = (1, 8, 32, 64)
CONTEXTS = (1024, 8192)

KV_BYTES = 2  # bfloat16
LEAST_TILE = 16  # rows of the smallest product of tensor cores
LAUNCHES = 26
"""Kernels and copies of a layer, one after the other, in the decode step of one request that JAX
0.12.0.1 compiles for sm_90a (without a device: it was never run); of 32 requests one more."""
BETWEEN_KERNELS = 1.5e-6
"""Seconds from the end of a kernel to the start of the next in a CUDA graph: an assumption."""


@dataclass(frozen=True)
class Hardware:
    """Eight GPUs in one machine, each linked to each; figures of one GPU."""

    name: str
    bandwidth: float  # bytes/s of its memory
    arithmetic: float  # bfloat16 FLOP/s without sparsity; int8 weights are multiplied as bfloat16
    link: float  # bytes/s to the others, in one direction
    all_reduce: float  # seconds of an all-reduce of next to nothing
    gpus: int = 8


# Bandwidth, arithmetic (half of what is given with sparsity) and NVLink (900 GB/s both ways):
# NVIDIA's data sheets of H100 and H200, SXM. All-reduce: the latency of 24 to 96 kB between 8 GPUs
# of one machine in microsoft/mscclpp issue 164, of an older generation.
HARDWARE = (
    Hardware("8 x H100 SXM", 3.35e12, 989e12, 450e9, 8e-6),
    Hardware("8 x H200", 4.8e12, 989e12, 450e9, 8e-6),
)


@dataclass(frozen=True)
class Step:
    """A decode step on one of the devices."""

    experts: float  # of a layer that some row uses, expected
    bytes_read: float
    memory: float  # seconds, as what follows
    arithmetic: float
    all_reduces: float
    launches: float

    @property
    def least(self) -> float:
        """Seconds that the step takes at least."""
        return max(self.memory, self.arithmetic) + self.all_reduces

    @property
    def binds(self) -> str:
        """What it waits for most."""
        parts = ("memory", "arithmetic", "all_reduces")
        return max(parts, key=lambda part: float(getattr(self, part))).replace("_", "-")


def distinct_experts(config: GrokConfig, rows: int) -> float:
    """How many experts of a layer so many rows use, expected, if all are as likely."""
    missed = 1 - config.num_selected_experts / config.num_experts
    return config.num_experts * (1 - missed**rows)


def all_reduce_seconds(hardware: Hardware, nbytes: int) -> float:
    """One sum over the devices: each reads all others' data, or, of much, all parts of its own.

    XLA's kernels do the first up to 256 KiB, the second up to 4 MiB (openxla/xla pull request
    43743).
    """
    others = hardware.gpus - 1
    moved = others * nbytes if nbytes <= 256 * 1024 else 2 * others / hardware.gpus * nbytes
    return hardware.all_reduce + moved / hardware.link


def decode_step(config: GrokConfig, hardware: Hardware, rows: int, context: int) -> Step:
    """One token for each of `rows` requests that have `context` positions each.

    Weights as released: int8 with bfloat16 scales, router, norms and embedding float32.
    """
    shards, layers = hardware.gpus, config.num_layers
    touched = distinct_experts(config, rows)
    each_layer = leaves(dataclasses.replace(config, num_layers=1))
    sizes = {leaf.name: leaf_bytes(leaf, config, shards) for leaf in each_layer}
    experts = sum(size for name, size in sizes.items() if "/moe/" in name)
    outside = sum(leaf_bytes(leaf, config, shards) for leaf in each_layer if leaf.layer is None)
    layer = sum(sizes.values()) - experts - outside + experts * touched / config.num_experts
    kv_heads = ModelShards(shards).local(config.num_kv_heads)
    kv = rows * context * 2 * kv_heads * config.key_size * KV_BYTES
    bytes_read = outside + layers * (layer + kv)

    # The kernel takes all rows for each expert that is used.
    tile = max(rows, LEAST_TILE)
    expert = 3 * config.emb_size * config.ffn_size
    heads = config.num_q_heads + config.num_kv_heads
    projections = 2 * config.emb_size * heads * config.key_size
    weights = layers * (touched * expert + projections) + config.vocab_size * config.emb_size
    attention = layers * rows * context * 2 * config.num_q_heads * config.key_size
    flops = 2 * (tile * weights + attention) / shards

    return Step(
        experts=touched,
        bytes_read=bytes_read,
        memory=bytes_read / hardware.bandwidth,
        arithmetic=flops / hardware.arithmetic,
        all_reduces=2 * layers * all_reduce_seconds(hardware, rows * config.emb_size * 4),
        launches=layers * LAUNCHES * BETWEEN_KERNELS,
    )


def table(config: GrokConfig) -> Iterator[str]:
    """The lines of a Markdown table."""
    columns = (
        "GPUs",
        "requests",
        "context",
        "experts of 8",
        "GB read",
        "memory, ms",
        "arithmetic, ms",
        "all-reduces, ms",
        "step, ms",
        "tokens/s",
        "binds",
        "with launches, ms",
        "tokens/s",
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for hardware in HARDWARE:
        for context in CONTEXTS:
            for rows in BATCHES:
                step = decode_step(config, hardware, rows, context)
                slower = step.least + step.launches
                cells = (
                    hardware.name,
                    rows,
                    context,
                    f"{step.experts:.1f}",
                    f"{step.bytes_read / 1e9:.1f}",
                    f"{step.memory * 1e3:.2f}",
                    f"{step.arithmetic * 1e3:.2f}",
                    f"{step.all_reduces * 1e3:.2f}",
                    f"{step.least * 1e3:.2f}",
                    f"{rows / step.least:,.0f}",
                    step.binds,
                    f"{slower * 1e3:.2f}",
                    f"{rows / slower:,.0f}",
                )
                yield f"| {' | '.join(map(str, cells))} |"


def section() -> str:
    """What stands between the marks of the page."""
    config = load_config(CONFIG)
    assumed = HARDWARE[0]
    lines = [
        f"Computed from `{CONFIG}` and data sheets; nothing of it was measured. Each GPU has an",
        "eighth of every tensor, and experts are chosen evenly. *GB read* is by one GPU: int8",
        "weights of the experts that are used, all other weights, and the KV of every request. A",
        f"step has {2 * config.num_layers} all-reduces of {config.emb_size * 4 / 1000:.0f} kB a "
        f"request, at {assumed.all_reduce * 1e6:.0f} µs and the links' {assumed.link / 1e9:.0f} "
        "GB/s; each µs more for",
        f"one adds {2 * config.num_layers * 1e-3:.2f} ms. *With launches* adds "
        f"{BETWEEN_KERNELS * 1e6:.1f} µs, an assumption, between the {LAUNCHES} kernels and copies",
        "of a layer. Left out are the embedding's all-reduce and the sampler, whose kernels are in",
        "[gpu.md](gpu.md#checked-without-a-gpu).",
        "",
        *table(config),
    ]
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The page with its section as it is now.

    Raises:
      ValueError: the page has no marks.
    """
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{section()}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="write no file")
    if parser.parse_args().print:
        print(section())
        return
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
