"""What the serving layer costs: tokens/s through tritonserver beside the engine alone.

The same requests, all at one time: submitted to an engine in this process, and sent by
perf_analyzer to a server's `grok1_generate` and `grok1_ensemble`, as streams with a response for
each token. They take turns, and each run through the server is compared with the mean of the two
runs of the engine that are nearest to it in time, for the machine's speed drifts. CPU time is that
of each process. Client, server and engine share the cores, or the engine leaves the last to others.

    python benchmarks/serving.py [--model DIR] [--slots N] [--rounds N] [--apart]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from load_report import read_loads
from processes import ended_cpu, group_cpu
from results import ROOT, Row

from grok1_backend.engine.build import ModelDirectory, build_engine
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import GenerationRequest, SamplingParams, TokenEvent
from grok1_backend.server import ServerOptions, TritonServer
from grok1_backend.server.options import free_ports

FOLDER = ROOT / ".cache" / "bench" / "serving"
STREAMS = 32
PROMPT_WORDS = 16
FRONTS = ("grok1_generate", "grok1_ensemble")
ALONE = "engine alone"
APART = "engine on its own core"
CLIENT = "perf_analyzer"
ATTEMPTS = 4
"""perf_analyzer exports empty tensors as what is in its memory, and fails if that is no number."""
# For sequences it names a request after its thread alone: with a thread each, no two are the same.
ONE_SHOTS = ("--sequence-length=1", "--sequence-length-variation=0", f"--max-threads={STREAMS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how much each of the streams asks for in a round."""

    name: str
    directory: Path
    slots: int | None
    requests: int
    tokens: int
    apart: bool = False
    """Whether the engine, alone too, leaves the last core to server, text models and client."""

    @property
    def total(self) -> int:
        return self.requests * self.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What one run gave."""

    rate: float
    """Tokens/s."""
    cpu: Mapping[str, float]
    """Process to its CPU microseconds a token."""
    responses: float = 1.0
    """A token."""


@dataclasses.dataclass
class Samples:
    """The runs of all rounds in their order: engine, front, engine, next front, ..., engine."""

    alone: list[Sample] = dataclasses.field(default_factory=list)
    served: list[Sample] = dataclasses.field(default_factory=list)

    def through(self, front: str) -> list[Sample]:
        """The runs through one front."""
        return self.served[FRONTS.index(front) :: len(FRONTS)]

    def alone_beside(self, front: str) -> list[float]:
        """For each of those runs the rate of the engine just before and after it."""
        beside = [(a.rate + b.rate) / 2 for a, b in itertools.pairwise(self.alone)]
        return beside[FRONTS.index(front) :: len(FRONTS)]


def prompts(streams: int) -> list[str]:
    """Distinct texts, which share no page of KV."""
    rng = np.random.default_rng(0)
    words = ["In", "the", "beginning", "and", "it", "came", "to", "pass", "that", "a", "king"]
    return [" ".join(rng.choice(words, PROMPT_WORDS)) for _ in range(streams)]


def engine_alone(engine: Engine, prompts: Sequence[tuple[int, ...]], case: Case) -> Sample:
    """The requests in this process, from the first submission to the last token."""
    ended: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    sampling = SamplingParams(temperature=0.0, max_tokens=case.tokens, ignore_eos=True, seed=0)

    def take(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            ended.put(event)

    def submit(number: int) -> None:
        prompt = prompts[number % len(prompts)]
        engine.submit(
            GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling), take
        )

    began, cpu = time.perf_counter(), time.process_time()
    for number in range(STREAMS):
        submit(number)
    for number in range(STREAMS, case.requests + STREAMS):
        event = ended.get()
        if event.error is not None:
            raise event.error
        if number < case.requests:
            submit(number)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Sample(rate=case.total / seconds, cpu={"engine": cpu / case.total * 1e6})


def through_server(front: str, pid: int, url: str, texts: Sequence[str], case: Case) -> Sample:
    """The requests from perf_analyzer, by what it measured.

    Args:
      front: the model that serves them.
      pid: the server's process.
      url: of its gRPC interface.
      texts: the prompts.
      case: how many requests, and how long.
    """
    settings = {"max_tokens": [case.tokens], "ignore_eos": [True], "temperature": [0.0]}
    data = [{"text_input": [text], **settings} for text in texts]
    inputs, export = FOLDER / "input.json", FOLDER / "profile.json"
    inputs.write_text(json.dumps({"data": data}), encoding="utf-8")
    command = [
        *(str(Path(sys.prefix) / "bin" / "perf_analyzer"), "-m", front),
        *("-i", "grpc", "-u", url, "--async", "--streaming"),
        *(f"--input-data={inputs}", f"--profile-export-file={export}"),
        *(f"--concurrency-range={STREAMS}", f"--request-count={case.requests}"),
        *(ONE_SHOTS if front == "grok1_ensemble" else ()),
    ]
    for attempt in range(1, ATTEMPTS + 1):
        export.unlink(missing_ok=True)
        before = cpu_seconds(pid)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        after = cpu_seconds(pid)
        try:
            if done.returncode:
                raise ValueError(done.stdout + done.stderr)
            (load,) = read_loads(export)
            break
        except ValueError:
            if attempt == ATTEMPTS:
                raise
    assert load.tokens_per_second is not None
    return Sample(
        rate=load.tokens_per_second,
        cpu={name: (after[name] - before[name]) / case.total * 1e6 for name in after},
        responses=load.responses_per_second / load.tokens_per_second,
    )


def cpu_seconds(server: int) -> dict[str, float]:
    """CPU time so far of the server, of the stub of each of its models, and of ended clients."""
    return {CLIENT: ended_cpu(), **group_cpu(server)}


@contextlib.contextmanager
def on(cores: Sequence[int]) -> Iterator[None]:
    """Keeps this thread, and what it starts meanwhile, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_case(case: Case, rounds: int) -> Samples:
    """Takes turns, after a round that only warms up.

    To be called before JAX has made its threads, of which it makes one a core.
    """
    cores = sorted(os.sched_getaffinity(0))
    engines, others = (cores[:-1], cores[-1:]) if case.apart else (cores, cores)
    os.environ["GROK1_CPUS"] = ",".join(map(str, engines))
    FOLDER.mkdir(parents=True, exist_ok=True)
    directory = ModelDirectory.read(case.directory, num_slots=case.slots)
    assert directory.tokenizer is not None
    texts = prompts(STREAMS)
    ids = [tuple(directory.tokenizer.encode(text)) for text in texts]
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        model_repositories=(ROOT / "model_repository",),
        model=case.directory,
        slots=case.slots,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        cache_dir=FOLDER,
        log_file=FOLDER / "tritonserver.log",
    )
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(FOLDER / "jax"))
    short = dataclasses.replace(case, requests=STREAMS, tokens=4)
    samples = Samples()
    with on(engines):
        engine = build_engine(directory, progress=lambda _: None)
    with engine, on(others), TritonServer(options, start_timeout=900) as server:

        def serve(front: str, run: Case) -> Sample:
            return through_server(front, server.pid, options.grpc_url, texts, run)

        engine_alone(engine, ids, short)
        for front in FRONTS:
            serve(front, short)
        samples.alone.append(engine_alone(engine, ids, case))
        for _ in range(rounds):
            for front in FRONTS:
                samples.served.append(serve(front, case))
                samples.alone.append(engine_alone(engine, ids, case))
    return samples


def rows_of(case: Case, samples: Samples) -> list[Row]:
    """Rates beside the engine's, and the CPU time of every process that took a part."""
    rows = []
    for front in FRONTS:
        taken = samples.through(front)
        rows.append(
            Row(
                name=f"{front}, {STREAMS} streams, {case.name}",
                unit="tokens/s",
                ours=[sample.rate for sample in taken],
                peers={ALONE: samples.alone_beside(front)},
                paired=True,
                details={
                    "responses_per_token": statistics.fmean(s.responses for s in taken),
                    "requests": case.requests,
                    "tokens": case.tokens,
                },
            )
        )
    for what, taken in [(ALONE, samples.alone), *((f, samples.through(f)) for f in FRONTS)]:
        for process in taken[0].cpu:
            cpu = [sample.cpu[process] for sample in taken]
            if statistics.median(cpu) >= 1:
                name = f"CPU a token, {case.name}, {what}: {process}"
                rows.append(Row(name=name, unit="µs", ours=cpu))
    return rows


def measure(bench_model: Path, rounds: int) -> list[Row]:
    """The bench model's rows, and those of the embedded model, whose engine is much faster."""
    shared = Case(name="bench model", directory=bench_model, slots=None, requests=32, tokens=64)
    cases = (
        shared,
        dataclasses.replace(shared, name=f"bench model, {APART}", apart=True),
        Case(
            name="embedded model",
            directory=ROOT / "embedded_model",
            slots=STREAMS,
            requests=64,
            tokens=128,
        ),
    )
    rows: list[Row] = []
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            samples = process.apply(measure_case, (case, rounds))
        made = rows_of(case, samples)
        show(made)
        rows += made
    return rows


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        record = row.record()
        ratio = f"{record['ratio']:.2f} of the {ALONE}" if "ratio" in record else ""
        print(f"{row.name:70s} {record['ours']:9.1f} {row.unit:9s} {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "embedded_model")
    parser.add_argument("--slots", type=int, default=STREAMS)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help=APART)
    options = parser.parse_args()
    case = Case(
        name=options.model.name,
        directory=options.model,
        slots=options.slots,
        requests=options.requests,
        tokens=options.tokens,
        apart=options.apart,
    )
    show(rows_of(case, measure_case(case, options.rounds)))


if __name__ == "__main__":
    main()
