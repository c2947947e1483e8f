"""What the machine is, and what it can do at best: the floor under every row is made of these."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

SOURCE = Path(__file__).with_name("machine.cpp")
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "amx_bf16")
"""Those that matter for products, by the kernel's names."""
SIDE = 2048


def describe() -> dict[str, Any]:
    """The processor, the cores that may be used, and the instruction sets that matter."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = set((re.search(r"^flags\s*: (.*)", text, re.MULTILINE) or [""] * 2)[1].split())
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return {
        "processor": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }


class Rates:
    """The best rates seen so far; `measure` is called now and then during a run."""

    def __init__(self, folder: Path) -> None:
        """Builds the C++ part in a folder, and takes a first sample."""
        folder.mkdir(parents=True, exist_ok=True)
        self._program = folder / "machine"
        flags = ["-O3", "-march=native", "-std=c++17", "-pthread"]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, SOURCE, "-o", self._program], check=True)
        self._square = jnp.ones((SIDE, SIDE))
        self._product = jax.jit(jnp.dot)
        self._product(self._square, self._square).block_until_ready()
        self.samples: dict[str, list[float]] = {
            name: [] for name in ("bytes_per_s", "float32_flop_per_s", "int8_op_per_s")
        }
        self.int8_instruction = ""
        self.measure()

    def measure(self) -> None:
        """Adds a sample of each rate; takes about 2 s."""
        command = [str(self._program), str(len(os.sched_getaffinity(0)))]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        read, products, self.int8_instruction = found.stdout.strip().split(maxsplit=2)
        self.samples["bytes_per_s"].append(float(read))
        self.samples["int8_op_per_s"].append(float(products))
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            self._product(self._square, self._square).block_until_ready()
            seconds.append(time.perf_counter() - began)
        self.samples["float32_flop_per_s"].append(2 * SIDE**3 / min(seconds))

    @property
    def bytes_per_s(self) -> float:
        """Reading memory, all cores together."""
        return max(self.samples["bytes_per_s"])

    @property
    def float32_flop_per_s(self) -> float:
        """A large float32 product in JAX."""
        return max(self.samples["float32_flop_per_s"])

    @property
    def int8_op_per_s(self) -> float:
        """The fastest int8 multiply-add instruction, on registers alone."""
        return max(self.samples["int8_op_per_s"])

    def record(self) -> dict[str, Any]:
        """For the results: the rates used, and the samples that they are the best of."""
        return {
            "bytes_per_s": self.bytes_per_s,
            "float32_flop_per_s": self.float32_flop_per_s,
            "int8_op_per_s": self.int8_op_per_s,
            "int8_instruction": self.int8_instruction,
            "rate_samples": self.samples,
        }
