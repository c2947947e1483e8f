"""Run by test_devices.py in processes of their own, since the number of host devices is fixed when
JAX starts. Prints a JSON object of what the tests judge.

Usage: on_devices.py one | on_devices.py two PORT PROCESS
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_values import CASES, GOLDEN, golden_config, golden_parameters
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grok1_backend.engine import programs
from grok1_backend.engine.decode_state import initial_state
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.runner import ModelRunner
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.sampler import Variant
from grok1_backend.kernels import native
from grok1_backend.model import steps
from grok1_backend.model.config import GrokConfig, load_config
from grok1_backend.model.embedding import quantize_table
from grok1_backend.model.parameters import EMBEDDING, abstract_parameters, place_parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.model.quantization import quantize

ROWS, PAGE, BUCKET, NEW_TOKENS = 8, 8, 32, 8
MESHES = ((1, 1), (1, 8), (2, 4), (8, 1))


def prompts() -> list[np.ndarray[Any, Any]]:
    """The reference's, and some of other lengths."""
    golden = np.load(GOLDEN / "golden_q8_fp32.npz")
    found = [golden[f"{case}/prompt"][: int(golden[f"{case}/length"])] for case in CASES]
    rng = np.random.default_rng(0)
    return found + [rng.integers(1, golden_config().vocab_size, length) for length in (3, 12, 29)]


class Steps:
    """The step functions on a (data, model) mesh, each data row with its own pages."""

    def __init__(
        self, named: dict[str, Any], shape: tuple[int, int], int8_embedding: bool = False
    ) -> None:
        config = golden_config()
        mesh = create_mesh(shape)
        self.parameters = place_parameters(named, config, mesh)
        if int8_embedding:
            self.parameters[EMBEDDING] = quantize_table(self.parameters[EMBEDDING])
        width = config.sequence_len // PAGE
        self.pool = steps.pool_creator(config, mesh, ROWS * width, PAGE, jnp.float32)()
        own = np.arange(ROWS)[:, None] % (ROWS // shape[0])  # page ids count from 0 in each row
        self.table = (own * width + np.arange(width)[::-1]).astype(np.int32)
        results = (steps.LOGITS_SPEC, steps.POOL_SPECS)
        inputs = (steps.STEP_INPUT_SPECS,)
        self._run = jax.jit(
            steps.on_mesh(
                steps.last_logits, self.parameters, mesh, config, jnp.float32, inputs, results
            ),
            donate_argnums=1,
        )

    def __call__(self, tokens: Any, starts: Any, lengths: Any) -> np.ndarray[Any, Any]:
        arrays = (np.asarray(array, np.int32) for array in (tokens, starts, lengths))
        step = steps.StepInput(*arrays, self.table)  # type: ignore[arg-type]
        logits, self.pool = self._run(self.parameters, self.pool, step)
        return np.asarray(logits)

    def prefill(self) -> np.ndarray[Any, Any]:
        tokens = np.zeros((ROWS, BUCKET), np.int32)
        for row, prompt in zip(tokens, prompts(), strict=True):
            row[: len(prompt)] = prompt
        return self(tokens, np.zeros(ROWS), [len(prompt) for prompt in prompts()])


def tokens_on_meshes(named: dict[str, Any]) -> dict[str, list[list[int]]]:
    """[tokens][rows] for each mesh."""
    found = {}
    for shape in MESHES:
        run = Steps(named, shape)
        lengths = np.array([len(prompt) for prompt in prompts()])
        chosen = [run.prefill().argmax(axis=1)]
        for i in range(NEW_TOKENS - 1):
            logits = run(chosen[-1][:, None], lengths + i, np.ones(ROWS))
            chosen.append(logits.argmax(axis=1))
        found[f"{shape[0]}x{shape[1]}"] = np.array(chosen).tolist()
    return found


def eight_groups() -> dict[str, float]:
    """Logits with 8 groups of scales: the relative distance of n shards from 1, without kernels."""
    named = golden_parameters("params_float.npz")
    for name, array in named.items():
        if "/moe/" in name or "/multi_head_attention/" in name:
            by_rows = name.endswith(("linear_1/w", "multi_head_attention/linear/w"))
            named[name] = quantize(jnp.asarray(array), 8 if by_rows else 1)
    kernels, native.available = native.available, lambda _: False
    logits = {shards: Steps(named, (1, shards)).prefill() for shards in (1, 2, 4, 8)}
    native.available = kernels
    one = logits[1]
    return {str(n): float(np.linalg.norm(logits[n] - one) / np.linalg.norm(one)) for n in (2, 4, 8)}


def int8_embedding(named: dict[str, Any]) -> dict[str, float]:
    """Logits with the embedding in int8: the relative distance of n shards from 1."""
    logits = {shards: Steps(named, (1, shards), True).prefill() for shards in (1, 2, 8)}
    one = logits[1]
    return {str(n): float(np.linalg.norm(logits[n] - one) / np.linalg.norm(one)) for n in (2, 8)}


class Compiled:
    """The programs of a runner for a config on 8 shards, compiled without memory."""

    def __init__(self, config: GrokConfig, dtype: Any, num_slots: int) -> None:
        mesh = create_mesh((1, 8))
        parameters = abstract_parameters(config, mesh)
        self.programs = programs.build(config, parameters, mesh, jnp.dtype(dtype))
        heads = max(8, config.num_kv_heads)
        pages = jax.ShapeDtypeStruct(
            (config.num_layers, 64, 64, heads, config.key_size),
            dtype,
            sharding=NamedSharding(mesh, steps.POOL_SPEC),
        )
        state = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=NamedSharding(mesh, P())
            ),
            jax.eval_shape(lambda: initial_state(num_slots, config.vocab_size)),
        )
        runner: Any = SimpleNamespace(
            vocab_size=config.vocab_size, context_length=config.sequence_len, page_size=64
        )
        self.arguments = programs.AbstractArguments.of(
            runner, mesh, parameters, steps.KVPool(pages, pages), state
        )

    def decode(self, rows: int) -> Any:
        return self.programs.decode.lower(*self.arguments.decode(rows)).compile()

    def prefill(self, rows: int, tokens: int) -> Any:
        return self.programs.prefill.lower(*self.arguments.prefill(rows, tokens)).compile()

    def sample(self, rows: int) -> Any:
        arguments = self.arguments.sample(rows)
        return self.programs.sample[Variant.GREEDY].lower(*arguments).compile()


def collectives(executable: Any) -> dict[str, dict[str, int]]:
    """Of an executable: computation ("entry", or the name of a loop's body) -> kind -> count."""
    kinds = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
    found: dict[str, Counter[str]] = {}
    name = ""
    for line in executable.as_text().splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = "entry" if start[1] else start[2]
        elif operation := re.search(rf" = [^=]* {kinds}", line):
            found.setdefault(name, Counter())[operation[1]] += 1
    return {name: dict(counts) for name, counts in found.items()}


def released_model() -> dict[str, int]:
    """Temporary bytes on each of 8 devices of steps at the released sizes (two layers of them)."""
    compiled = Compiled(
        dataclasses.replace(load_config("grok1-314b"), num_layers=2), jnp.bfloat16, 32
    )
    steps_ = {"decode 32": compiled.decode(32), "prefill 32": compiled.prefill(1, 32)}
    return {name: step.memory_analysis().temp_size_in_bytes for name, step in steps_.items()}


def hybrid_mesh() -> str:
    """What is said when hosts are asked for that are not there."""
    try:
        create_mesh((1, 4), (1, 2))
    except ValueError as error:
        return str(error)
    return "made"


def one_process() -> dict[str, Any]:
    named = golden_parameters("params_q8.npz")
    small = Compiled(golden_config(), jnp.float32, 4)
    decode = small.decode(4)
    return {
        "tokens": tokens_on_meshes(named),
        "groups": eight_groups(),
        "int8 embedding": int8_embedding(named),
        "decode": collectives(decode),
        "sample": collectives(small.sample(4)),
        "arguments": len(jax.tree.leaves(small.arguments.decode(4))),
        "temporary": released_model(),
        "hybrid mesh": hybrid_mesh(),
    }


def two_processes(port: str, process: int) -> dict[str, Any]:
    """The model over both processes: greedy tokens after each prompt, by the runner."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    config, mesh = golden_config(), create_mesh((1, 4), (1, 2))
    parameters = place_parameters(golden_parameters("params_q8.npz"), config, mesh)
    settings = RunnerSettings(
        num_slots=1, page_size=PAGE, prefill_tokens=(BUCKET,), prefill_rows=(1,), decode_rows=(1,)
    )
    runner = ModelRunner(config, parameters, mesh, settings, lambda _: None)
    pages = range(runner.num_pages)
    golden = np.load(GOLDEN / "golden_q8_fp32.npz")
    found = {}
    for case in ("len5", "len31"):
        prompt = golden[f"{case}/prompt"][: int(golden[f"{case}/length"])].astype(np.int32)
        runner.start_slot(0, SamplingParams(temperature=0.0, seed=0), prompt, len(prompt))
        row = PrefillRow(slot=0, tokens=prompt, start=0, pages=pages, sample=True)
        handles = [runner.prefill([row])]
        handles += [runner.decode([DecodeRow(slot=0, pages=pages)]) for _ in range(15)]
        found[case] = [int(handle.result().token_ids[0]) for handle in handles]
    processes = [[device.process_index for device in row] for row in mesh.devices]
    return {"tokens": found, "mesh": processes}


if __name__ == "__main__":
    if sys.argv[1] == "one":
        print(json.dumps(one_process()))
    else:
        print(json.dumps(two_processes(sys.argv[2], int(sys.argv[3]))))
