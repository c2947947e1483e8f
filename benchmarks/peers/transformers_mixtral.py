"""Hugging Face Transformers with Mixtral of the sizes of the benchmark's model, eager, float32.

Run by `run.py` with the Python of vLLM's environment: `transformers_mixtral.py SIZES_JSON`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from mixtral import config
from worker import decode_window, prompts, reserve_output, serve


def main() -> None:
    sizes = json.loads(sys.argv[1])
    send = reserve_output()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    made = transformers.MixtralConfig(**config(sizes))
    model = transformers.MixtralForCausalLM._from_config(made, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(batch: list[list[int]], tokens: int) -> list[float]:
        """Generates so many tokens for each prompt; returns when each step's came."""
        cache = transformers.DynamicCache(config=made)
        ids, times = torch.tensor(batch), []
        for _ in range(tokens):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter())
        return times

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        batch = prompts(seed, 1, tokens, sizes["vocab_size"])
        began = time.perf_counter()
        (first,) = run(batch, 1)
        return {"tokens": tokens, "seconds": first - began}

    def decode(requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        times = run(prompts(seed, requests, prompt, sizes["vocab_size"]), tokens)
        return decode_window([times] * requests)

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    serve(send, {"prefill": prefill, "decode": decode}, versions)


if __name__ == "__main__":
    main()
