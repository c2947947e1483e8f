"""The engines of a comparison: ours in each kind of weights, and the peers that are installed.

Each is a `Worker` that is started when it is first needed. One that fails is left out from then
on, and `missing` says why: the others are still measured.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
from bench_model import CONFIG, RUNNER, random_leaves, write_model
from workers import Worker, WorkerError

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Variant:
    """How ours stores the weights of the layers and the embedding."""

    weights: str
    embedding: str


OURS = {
    "int8": Variant("int8", "float32"),
    "int8, int8 embedding": Variant("int8", "int8"),
    "float32": Variant("float32", "float32"),
}
LLAMA_CPP = {"llama.cpp F32": "f32", "llama.cpp Q8_0": "q8_0"}
VLLM = "vLLM Mixtral F32"
TRANSFORMERS = "Transformers Mixtral F32"
MIXTRALS = {VLLM: "vllm_mixtral.py", TRANSFORMERS: "transformers_mixtral.py"}
"""Peers to their scripts; both are in one environment."""
SIZES = json.dumps(dataclasses.asdict(CONFIG) | {"ffn_size": CONFIG.ffn_size})


class Contenders:
    """Starts and keeps the workers; a context manager that ends them all."""

    def __init__(self, folder: Path, peers: Path | None) -> None:
        """Starts nothing yet.

        Args:
          folder: for models and logs; models in it are used again.
          peers: where `peers/install.sh` put the other engines; None: ours alone.
        """
        self.folder = folder
        self.peers = peers
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        """Of the peers that were started."""
        self.ours: dict[str, str] = {}
        """Of what ours runs on."""
        self._workers: dict[str, Worker] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engines; one that is needed again is started again."""
        while self._workers:
            self._workers.popitem()[1].close()

    def ready(self, name: str) -> bool:
        """Whether an engine can be measured; starts it if need be."""
        if name in self._workers:
            return True
        if name in self.missing or (self.peers is None and name not in OURS):
            return False
        try:
            worker = self._start(name)
        except (WorkerError, OSError, subprocess.CalledProcessError) as error:
            self._give_up(name, error)
            return False
        self._workers[name] = worker
        (self.ours if name in OURS else self.versions).update(worker.versions)
        return True

    def call(self, name: str, command: str, **arguments: Any) -> dict[str, Any] | None:
        """One measurement; None where the engine has failed, which is then left out."""
        try:
            return self._workers[name].call(command, **arguments)
        except WorkerError as error:
            self._workers.pop(name).close()
            self._give_up(name, error)
            return None

    def model(self, name: str) -> Path:
        """The model directory of a variant of ours; made if need be."""
        variant = OURS[name]
        runner = dataclasses.replace(RUNNER, embedding=variant.embedding)
        return write_model(self.folder / _file_name(name), variant.weights, runner)

    def gguf(self, kind: str) -> Path:
        """The benchmark's model for llama.cpp, the same numbers as ours; made if need be.

        Args:
          kind: a value of `LLAMA_CPP`.
        """
        path = self.folder / f"{kind}.gguf"
        if not path.exists():
            weights = self.folder / "weights.npz"
            np.savez(weights, **random_leaves("float32"))
            command: list[str | Path] = [self._python("llama.cpp"), HERE / "peers" / "make_gguf.py"]
            subprocess.run([*command, SIZES, weights, path, kind], check=True)
            weights.unlink()
        return path

    def _give_up(self, name: str, error: Exception) -> None:
        self.missing[name] = str(error)
        print(f"{name} is left out: {error}", flush=True)

    def _start(self, name: str) -> Worker:
        environment = {}
        command: list[str | Path]
        if name in OURS:
            command = [sys.executable, HERE / "ours.py", self.model(name)]
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "jax")
        elif name in LLAMA_CPP:
            source = self._installed("llama.cpp") / "source"
            script = HERE / "peers" / "llama_cpp_grok.py"
            command = [self._python("llama.cpp"), script, self.gguf(LLAMA_CPP[name])]
            environment["PYTHONPATH"] = str(source)
        else:
            command = [self._python("vllm"), HERE / "peers" / MIXTRALS[name], SIZES]
        log = self.folder / f"{_file_name(name)}.log"
        return Worker(name, command, log=log, environment=environment)

    def _installed(self, engine: str) -> Path:
        assert self.peers is not None
        return self.peers / engine

    def _python(self, engine: str) -> Path:
        return self._installed(engine) / "bin" / "python"


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")
