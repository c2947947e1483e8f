"""Our engine under measurement: a model directory, served to requests in this process.

    ours.py MODEL_DIRECTORY

Run by `run.py`; speaks the protocol of `peers/worker.py`. Requests go through the scheduler as
they do when Triton sends them: continuous batching, pages, the sampler, events for each token.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from typing import Any

from peers.worker import decode_window, prompts, reserve_output, serve


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a batch of requests gave."""

    times: list[list[float]]
    """When each token of each request came."""
    first_tokens: list[int]
    """Of each request, in the order in which they came."""
    expert_bytes: int
    """Of experts, read in the window of `decode_window`."""


def main() -> None:
    send = reserve_output()
    import jax

    from grok1_backend.engine.build import ModelDirectory, build_engine
    from grok1_backend.engine.requests import GenerationRequest, SamplingParams, TokenEvent
    from grok1_backend.kernels import native

    directory = ModelDirectory.read(sys.argv[1])
    config = directory.config
    engine = build_engine(directory, progress=lambda line: print(line, file=sys.stderr))
    count = 0

    def run(batch: list[list[int]], tokens: int) -> Generated:
        """Generates so many tokens for each prompt."""
        nonlocal count
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        times: list[list[float]] = [[] for _ in batch]
        first_tokens: list[int] = []
        read: list[int] = []  # expert bytes, at the start and the end of the window
        errors: list[Exception] = []
        ended = threading.Semaphore(0)

        def take(event: TokenEvent, came: list[float]) -> None:
            if event.token_ids and not came:
                first_tokens.append(event.token_ids[0])
            came += [time.perf_counter()] * len(event.token_ids)
            if event.error is not None:
                errors.append(event.error)
            if not read and all(times):
                read.append(expert_bytes())
            if event.finish_reason is not None:
                read.append(expert_bytes())
                ended.release()

        for prompt, came in zip(batch, times, strict=True):
            count += 1
            request = GenerationRequest(
                request_id=str(count), prompt=tuple(prompt), sampling=sampling
            )
            engine.submit(request, functools.partial(take, came=came))
        for _ in batch:
            ended.acquire()
        if errors:
            raise errors[0]
        return Generated(times, first_tokens, read[1] - read[0])

    def expert_bytes() -> int:
        return native.counters()[1] if native.available(directory.runner.dtype) else 0

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        batch = prompts(seed, 1, tokens, config.vocab_size)
        began = time.perf_counter()
        found = run(batch, 1)
        (first,), (token,) = found.times[0], found.first_tokens
        return {"tokens": tokens, "seconds": first - began, "first_token": token}

    def decode(requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        found = run(prompts(seed, requests, prompt, config.vocab_size), tokens)
        window = decode_window(found.times)
        steps = window["tokens"] / requests
        return {**window, "expert_bytes_per_step": found.expert_bytes / steps}

    kernels = "native" if native.available(directory.runner.dtype) else "JAX alone"
    versions = {"jax": jax.__version__, "kernels": kernels}
    serve(send, {"prefill": prefill, "decode": decode}, versions)


if __name__ == "__main__":
    main()
