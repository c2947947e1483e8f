"""Everything that `make bench` measures, ours beside the peers, and the floor of the machine.

    python benchmarks/run.py [--peers DIR] [--rounds N] [--only NAME ...]

Writes `benchmarks/results/<name>.json` after each part; `report.py` makes the tables and plots of
`docs/performance.md` from them. In every comparison the engines take turns, round by round.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_model import CONFIG
from contenders import LLAMA_CPP, MIXTRALS, OURS, VLLM, Contenders
from floor import EXPERT_VALUES, ITEM_BYTES, Needs, needs
from machine import Rates, describe
from results import RESULTS, ROOT, Row, Run, commit

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment in which glibc asks for pages of 2 MB: it gives the peers, and the floor, what our
runner does for its own arrays."""
CORES = 2
WITH_CONTENDERS = ("decode", "prefill")
"""Parts that measure loaded engines; for the others their memory is given back."""
FEW_ROUNDS = 3
"""The most for parts in which a round takes long."""
SAMPLER_ROUNDS = 30
FOLDER = ROOT / ".cache" / "bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Requests that generate together, each after a prompt of its own."""

    requests: int
    prompt: int
    tokens: int
    ours: Sequence[str]
    peers: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """One prompt, until its first token."""

    tokens: int
    ours: Sequence[str] = ("int8",)
    peers: Sequence[str] = (*LLAMA_CPP, *MIXTRALS)


QUANTIZED = tuple(name for name in OURS if name != "float32")
DECODE = (
    Decode(requests=1, prompt=128, tokens=64, ours=QUANTIZED, peers=["llama.cpp Q8_0"]),
    Decode(
        requests=1,
        prompt=128,
        tokens=64,
        ours=["float32"],
        peers=["llama.cpp F32", *MIXTRALS],
    ),
    Decode(requests=8, prompt=64, tokens=48, ours=QUANTIZED, peers=[*LLAMA_CPP, *MIXTRALS]),
    Decode(requests=32, prompt=64, tokens=32, ours=QUANTIZED, peers=["llama.cpp Q8_0", VLLM]),
)
PREFILL = (Prefill(tokens=64), Prefill(tokens=512), Prefill(tokens=2048))


@dataclasses.dataclass
class Bench:
    """What the parts of a run share."""

    contenders: Contenders
    rates: Rates
    rounds: int

    @property
    def few_rounds(self) -> int:
        return min(self.rounds, FEW_ROUNDS)

    def take_turns(
        self, names: Sequence[str], command: str, **arguments: int
    ) -> dict[str, list[dict[str, float]]]:
        """Measures the engines that are there, in turn; the first round only warms up."""
        names = [name for name in names if self.contenders.ready(name)]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        self.rates.measure()
        for number in range(self.rounds + 1):
            for name in list(samples):
                result = self.contenders.call(name, command, seed=number, **arguments)
                if result is None:
                    del samples[name]
                elif number:
                    samples[name].append(result)
        return samples

    def decode(self) -> list[Row]:
        rows = []
        for case in DECODE:
            asked = {"requests": case.requests, "prompt": case.prompt, "tokens": case.tokens}
            samples = self.take_turns([*case.ours, *case.peers], "decode", **asked)
            for ours in (name for name in case.ours if name in samples):
                work, details = _decode_needs(case, ours, samples[ours])
                rows.append(
                    self._row(
                        f"decode, {_requests(case.requests)}, {ours}",
                        samples,
                        ours,
                        case.peers,
                        floor=case.requests / work.least_seconds(self.rates),
                        details={**asked, **details},
                    )
                )
        return rows

    def prefill(self) -> list[Row]:
        rows = []
        for case in PREFILL:
            names = [*case.ours, *case.peers]
            samples = self.take_turns(names, "prefill", tokens=case.tokens)
            for ours in (name for name in case.ours if name in samples):
                work = needs(1, case.tokens, 0, weights=OURS[ours].weights, arithmetic="float32")
                rows.append(
                    self._row(
                        f"prefill, {case.tokens} tokens, {ours}",
                        samples,
                        ours,
                        case.peers,
                        floor=case.tokens / work.least_seconds(self.rates),
                        details={
                            "float32_flop": work.float32_flop,
                            "first_tokens": _first_tokens(samples),
                        },
                    )
                )
        return rows

    def _row(
        self,
        name: str,
        samples: dict[str, list[dict[str, float]]],
        ours: str,
        peers: Sequence[str],
        *,
        floor: float,
        details: dict[str, object],
    ) -> Row:
        rates = {
            engine: [sample["tokens"] / sample["seconds"] for sample in taken]
            for engine, taken in samples.items()
        }
        row = Row(
            name=name,
            unit="tokens/s",
            ours=rates[ours],
            peers={peer: rates[peer] for peer in peers if peer in rates},
            floor=floor,
            details=details,
        )
        record = row.record()
        against = f", {record['ratio']:.2f} x {record['peer_name']}" if "ratio" in record else ""
        print(
            f"{name}: {record['ours']:.1f} tokens/s, {record['floor_ratio']:.0%} of floor{against}",
            flush=True,
        )
        return row

    def first_token(self) -> list[Row]:
        import first_token

        return first_token.measure(self.contenders, self.rounds)

    def serving(self) -> list[Row]:
        import serving

        return serving.measure(self.contenders.model("int8"), self.rounds)

    def startup(self) -> list[Row]:
        import startup

        return startup.measure(ROOT / "embedded_model", self.few_rounds)

    def engine(self) -> list[Row]:
        import engine

        return engine.measure(ROOT / "embedded_model", self.few_rounds)

    def sampler(self) -> list[Row]:
        import sampler

        return sampler.measure(SAMPLER_ROUNDS)

    def scale(self) -> list[Row]:
        import scale

        return scale.measure(self.few_rounds)

    @property
    def parts(self) -> dict[str, Callable[[], list[Row]]]:
        """Name of a part, and of its file, to what measures it."""
        return {
            "decode": self.decode,
            "prefill": self.prefill,
            "first_token": self.first_token,
            "serving": self.serving,
            "startup": self.startup,
            "engine": self.engine,
            "sampler": self.sampler,
            "scale": self.scale,
        }


def _decode_needs(
    case: Decode, ours: str, samples: Sequence[dict[str, float]]
) -> tuple[Needs, dict[str, float | None]]:
    """What a step of ours must do, with as many experts as it was seen to read."""
    kind, kv = OURS[ours], case.prompt + case.tokens / 2
    expert = CONFIG.num_layers * EXPERT_VALUES * ITEM_BYTES[kind.weights]
    read = statistics.fmean(sample["expert_bytes_per_step"] for sample in samples)
    experts = read / expert or None  # none are counted without the native kernels
    work = needs(
        case.requests, 1, kv, weights=kind.weights, embedding=kind.embedding, experts=experts
    )
    details = {"kv_length": kv, "experts_touched": experts, "bytes_per_step": work.bytes}
    return work, details


def _first_tokens(samples: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """Of the engines that compute the same model: they should agree."""
    return {
        engine: [sample["first_token"] for sample in taken]
        for engine, taken in samples.items()
        if all("first_token" in sample for sample in taken)
    }


def _requests(count: int) -> str:
    return f"{count} request" + "s" * (count > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="where peers/install.sh put the other engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to measure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not HUGE_PAGES.items() <= os.environ.items():
        # All engines have what ours has when it serves; a process gets it only at its start.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})
    # Asked to end, it ends the engines too: those that stand still would not notice by themselves.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    began, failed, measured = time.monotonic(), [], commit()
    with Contenders(FOLDER, options.peers) as contenders:
        bench = Bench(contenders, Rates(FOLDER), options.rounds)
        for name in options.only or bench.parts:
            if name not in WITH_CONTENDERS:
                contenders.close()
            try:
                rows = bench.parts[name]()
            except Exception as error:
                print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
                failed.append(name)
                continue
            run = Run(
                machine=describe() | bench.rates.record(),
                ours=contenders.ours,
                peer_versions=contenders.versions,
                missing=contenders.missing,
                commit=measured,
            )
            path = run.write(name, rows, options.results)
            print(f"{time.monotonic() - began:.0f} s: {path}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
