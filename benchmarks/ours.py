"""Our engine under measurement: a model directory, served to requests in this process.

    ours.py MODEL_DIRECTORY

Run by `run.py`; speaks the protocol of `peers/worker.py`. Requests go through the scheduler as
they do when Triton sends them: continuous batching, pages, the sampler, events for each token.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("peers")))

from worker import decode_window, prompts, reserve_output, serve


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

    def run(batch: list[list[int]], tokens: int) -> tuple[list[list[float]], int]:
        """Generates so many tokens for each prompt.

        Returns:
          When each token came; bytes of experts read from when the last request had its first
          token to when the first had its last, which is the window of `decode_window`.
        """
        nonlocal count
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        times: list[list[float]] = [[] for _ in batch]
        read: list[int] = []  # expert bytes, at the start and the end of the window
        errors: list[Exception] = []
        ended = threading.Semaphore(0)

        def take(event: TokenEvent, came: list[float]) -> None:
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
            engine.submit(request, lambda event, came=came: take(event, came))
        for _ in batch:
            ended.acquire()
        if errors:
            raise errors[0]
        return times, read[1] - read[0]

    def expert_bytes() -> int:
        return native.counters()[1] if native.available(directory.runner.dtype) else 0

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        batch = prompts(seed, 1, tokens, config.vocab_size)
        began = time.perf_counter()
        ((first,),), _ = run(batch, 1)
        return {"tokens": tokens, "seconds": first - began}

    def decode(requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        times, read = run(prompts(seed, requests, prompt, config.vocab_size), tokens)
        window = decode_window(times)
        steps = window["tokens"] / requests
        return {**window, "expert_bytes_per_step": read / steps}

    versions = {"jax": jax.__version__}
    serve(send, {"prefill": prefill, "decode": decode}, versions)


if __name__ == "__main__":
    main()
