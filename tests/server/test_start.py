"""What a start does: all is compiled before the server is ready, and only the engine loads JAX."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from generation import Stream, eventually, metric, one_shot
from tritonclient import grpc

from grok1_backend.server import TritonServer
from grok1_backend.triton.interface import ENSEMBLE, GROK1, MODELS
from servers import process_of

# Around every bucket of prefill, and in chunks.
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700, 1500)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 2.0},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"min_tokens": 3},
    {"end_id": 9},
    {"stop_words": ["the", "and"]},
    {"bad_words": ["the", " of the"]},
    {"embedding_bias_words": ["king"], "embedding_bias_weights": [4.0]},
    {"sampling_parameters": '{"allowed_token_ids": [5, 6, 7], "logit_bias": {"5": 1.0}}'},
    {"return_log_probs": True, "return_top_tokens": 3},
    {"return_prompt_log_probs": True},
    {"return_prompt_log_probs": True, "max_tokens": 0},
    {"priority": 3, "stream": False},
)


def test_only_the_engine_loads_jax(server: TritonServer) -> None:
    python_models = {name for name in MODELS if name != ENSEMBLE.name}
    maps = {
        name: Path(f"/proc/{process_of(server, name)}/maps").read_text() for name in python_models
    }
    assert {name for name, libraries in maps.items() if "jaxlib" in libraries} == {GROK1.name}


def test_a_mixed_workload_compiles_nothing(server: TritonServer) -> None:
    urls = server.options
    slots = int(metric(urls.metrics_url, "grok1_slots"))
    chance = random.Random(3)
    requests = [
        {"input_ids": chance.choices(range(10, 2000), k=length), "max_tokens": 4, **settings}
        for settings in SETTINGS
        for length in (*chance.sample(LENGTHS, 3), chance.choice(LENGTHS))
    ]
    requests += [{"input_ids": [5] * length, "max_tokens": 4} for length in LENGTHS]
    requests += [{"text_input": "In the beginning", "max_tokens": 8} for _ in range(8)]
    chance.shuffle(requests)
    time.sleep(1)  # metrics are written four times a second: other tests are counted then
    ended = metric(urls.metrics_url, "grok1_requests_total")
    with Stream(urls.grpc_url) as stream:
        # One at a time, two, ... and more than there are slots, on all models that stream.
        left = list(requests)
        while left:
            for together in range(1, slots + 3):
                wave, left = left[:together], left[together:]
                for inputs in wave:
                    model = chance.choice(("grok1_generate", "grok1_ensemble"))
                    options = one_shot(uuid.uuid4().hex) if model == "grok1_ensemble" else {}
                    options["request_id"] = uuid.uuid4().hex
                    stream.send(model, options=options, **inputs)
                assert len(stream.collect(len(wave))) == len(wave)
        _converse(stream)
        _cancel(urls.grpc_url)
    _complete(urls.grpc_url)
    total = ended + len(requests) + 3 + 1 + 4
    assert eventually(lambda: metric(urls.metrics_url, "grok1_requests_total") == total, 5)
    assert metric(urls.metrics_url, "grok1_compilations_total") == 0


def _converse(stream: Stream) -> None:
    for place in range(3):
        flags = {"sequence_start": place == 0, "sequence_end": place == 2}
        options = {"sequence_id": "compilations", **flags}
        stream.ask("grok1_ensemble", options=options, text_input="And he said", max_tokens=5)


def _cancel(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        stream.send("grok1_generate", text_input="And", max_tokens=8000, ignore_eos=True)
        stream.receive()


def _complete(grpc_url: str) -> None:
    """Four prompts in one request."""
    text = grpc.InferInput("text_input", [4, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"And"], [b"But"], [b"The king"], [b"I"]], dtype=object))
    limit = grpc.InferInput("max_tokens", [4, 1], "INT32")
    limit.set_data_from_numpy(np.array([[1], [2], [3], [4]], np.int32))
    with grpc.InferenceServerClient(grpc_url) as client:
        client.infer("grok1_complete", [text, limit])
