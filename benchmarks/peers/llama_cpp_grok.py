"""llama.cpp with its Grok architecture, by its own batch interface, so that it decodes as it can.

Run by `run.py` with the Python of llama.cpp's environment: `llama_cpp_grok.py MODEL.gguf`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from worker import decode_window, prompts, reserve_output, serve

SEQUENCES = 32
CONTEXT = 2560
"""Positions of each sequence."""
BATCH = 2048
LOGICAL_CHUNK = 512


def main() -> None:
    (model_file,) = sys.argv[1:]
    send = reserve_output()
    import llama_cpp as llama
    import numpy as np

    threads = len(os.sched_getaffinity(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(
        model_file.encode(), llama.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp does not load {model_file}")
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(BATCH, 0, 1)

    def context(sequences: int) -> Any:
        """A context of so many sequences, each with positions of its own."""
        given = llama.llama_context_default_params()
        given.n_ctx, given.n_seq_max = CONTEXT * sequences, sequences
        given.n_batch, given.n_ubatch = BATCH, LOGICAL_CHUNK
        given.n_threads = given.n_threads_batch = threads
        return llama.llama_init_from_model(model, given)

    contexts: dict[int, Any] = {}

    def cleared(sequences: int) -> Any:
        found = contexts.get(sequences) or contexts.setdefault(sequences, context(sequences))
        llama.llama_memory_clear(llama.llama_get_memory(found), True)
        return found

    def compute(held: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Runs a batch of (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama.llama_decode(held, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama.llama_synchronize(held)

    def best(held: Any, index: int) -> int:
        """The most likely token after the batch's token of that index."""
        logits = llama.llama_get_logits_ith(held, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, (vocab_size,))))

    def read_prompt(held: Any, sequence: int, prompt: list[int]) -> int:
        """Computes a prompt in as large batches as go; returns the first token after it."""
        last = len(prompt) - 1
        for start in range(0, len(prompt), BATCH):
            part = list(enumerate(prompt))[start : start + BATCH]
            compute(held, [(token, i, sequence, i == last) for i, token in part])
        return best(held, last % BATCH)

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        (prompt,) = prompts(seed, 1, tokens, vocab_size)
        held = cleared(1)
        began = time.perf_counter()
        first = read_prompt(held, 0, prompt)
        return {"tokens": tokens, "seconds": time.perf_counter() - began, "first_token": first}

    def decode(requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        held = cleared(requests)
        given = prompts(seed, requests, prompt, vocab_size)
        last = [read_prompt(held, sequence, ids) for sequence, ids in enumerate(given)]
        times = [time.perf_counter()]
        for position in range(prompt, prompt + tokens - 1):
            compute(held, [(token, position, i, True) for i, token in enumerate(last)])
            last = [best(held, i) for i in range(requests)]
            times.append(time.perf_counter())
        return decode_window([times] * requests)

    serve(send, {"prefill": prefill, "decode": decode}, {"llama-cpp-python": llama.__version__})


if __name__ == "__main__":
    main()
