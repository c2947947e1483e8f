"""The three text models answer, and say the same: streamed or not, alone or with others."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from generation import SECONDS, Response, Stream, one_shot, post, text_of, tokens_of
from tritonclient import http

from grok1_backend.engine.build import ModelDirectory, build_engine
from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import GenerationRequest, SamplingParams, TokenEvent
from grok1_backend.server import TritonServer
from grok1_backend.text.stream import group_text
from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer
from grok1_backend.triton.interface import TEXT_OUTPUTS

STREAMING = ("grok1_generate", "grok1_ensemble")
PROMPTS = (
    "In the beginning",
    " leading spaces\n\nand lines",
    "天地玄黃 宇宙洪荒",
    "emoji 🌍👩\u200d👩\u200d👧 and e\u0301 combining",
    "בראשית ברא אלהים",
    "\x00\x01 control and \u0600\ufeff",
)
# Sampled without a filter, a small model writes byte tokens, broken UTF-8 included.
WILD: dict[str, Any] = {"temperature": 4.0, "seed": 11, "max_tokens": 48, "ignore_eos": True}


def ask(url: str, model: str, **inputs: Any) -> list[Response]:
    options = one_shot(str(uuid.uuid4())) if model == "grok1_ensemble" else None
    with Stream(url) as stream:
        return stream.ask(model, options=options, **inputs)


def complete(http_url: str, **settings: Any) -> dict[str, Any]:
    answer = post(f"{http_url}/v2/models/grok1_complete/generate", settings)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("model", STREAMING)
def test_a_prompt_streams(grpc_url: str, model: str) -> None:
    responses = ask(grpc_url, model, text_input="In the beginning", max_tokens=12)
    assert len(responses) > 1
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert [r.value("finish_reason") for r in responses[:-1]] == [""] * (len(responses) - 1)
    last = responses[-1]
    assert last.value("finish_reason") in ("length", "stop")
    assert last.value("num_output_tokens") == len(tokens_of(responses)) <= 12
    assert len({r.value("request_id") for r in responses}) == 1
    assert text_of(responses).strip()


@pytest.mark.parametrize("model", STREAMING)
def test_stream_false_gives_one_response(grpc_url: str, model: str) -> None:
    (response,) = ask(grpc_url, model, text_input="In the beginning", max_tokens=12, stream=False)
    assert response.final
    assert response.value("num_output_tokens") == len(response.token_ids) > 1


class InProcess:
    """An engine without a server, on the server's model directory."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def text(self, prompt: str, sampling: SamplingParams) -> str:
        """What it writes after a prompt, in one piece."""
        ids = tuple(self.tokenizer.encode(prompt))
        request = GenerationRequest(request_id="a", prompt=ids, sampling=sampling, stream=False)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.engine.submit(request, events.put)
        event = events.get(timeout=SECONDS)
        assert event.error is None
        whole = b"".join(map(self.tokenizer.token_bytes, event.token_ids))
        return whole[: len(whole) - event.text_trim].decode(errors="replace")


@pytest.fixture(scope="module")
def in_process(server: TritonServer) -> Iterator[InProcess]:
    directory = ModelDirectory.read(server.options.model)
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(server.options.cache / "jax"))
        built = build_engine(directory, progress=lambda _line: None)
    tokenizer = Tokenizer(directory.path / TOKENIZER_FILE)
    with built as engine:
        yield InProcess(engine, tokenizer)


def of_all_tokens(_in_process: InProcess, _prompt: str) -> SamplingParams:
    return SamplingParams(**WILD)


def of_the_prompts_tokens(in_process: InProcess, prompt: str) -> SamplingParams:
    """Characters of the prompt's script, whole and broken."""
    return SamplingParams(**WILD, allowed_token_ids=tuple(in_process.tokenizer.encode(prompt)))


def stopped(in_process: InProcess, prompt: str) -> SamplingParams:
    """Ended by a word that comes in mid-text."""
    sampling = of_the_prompts_tokens(in_process, prompt)
    whole = [c for c in in_process.text(prompt, sampling) if c != "\ufffd"]
    word = whole[len(whole) // 2]
    return dataclasses.replace(sampling, stop_words=(word.encode(),))


def as_vllm(sampling: SamplingParams) -> str:
    """The settings of these tests as `sampling_parameters`."""
    settings = {name: getattr(sampling, name) for name in WILD}
    settings["stop"] = [word.decode() for word in sampling.stop_words]
    if sampling.allowed_token_ids is not None:
        settings["allowed_token_ids"] = list(sampling.allowed_token_ids)
    return json.dumps(settings)


@pytest.mark.parametrize("settings", [of_all_tokens, of_the_prompts_tokens, stopped])
def test_texts_of_many_streams_at_once_are_those_of_an_engine_in_this_process(
    grpc_url: str,
    http_url: str,
    in_process: InProcess,
    settings: Callable[[InProcess, str], SamplingParams],
) -> None:
    sampling = {prompt: settings(in_process, prompt) for prompt in PROMPTS}
    expected = {prompt: in_process.text(prompt, sampling[prompt]) for prompt in PROMPTS}

    def streamed(job: tuple[str, str]) -> list[Response]:
        model, prompt = job
        wanted = as_vllm(sampling[prompt])
        return ask(grpc_url, model, text_input=prompt, sampling_parameters=wanted)

    jobs = [(model, prompt) for model in STREAMING for prompt in PROMPTS]
    with ThreadPoolExecutor(len(jobs)) as threads:
        answers = list(threads.map(streamed, jobs))
    token_bytes = in_process.tokenizer.token_bytes
    for (model, prompt), responses in zip(jobs, answers, strict=True):
        assert text_of(responses) == expected[prompt], (model, prompt)
        if settings is not stopped:
            assert len(responses) > 1
            assert len(tokens_of(responses)) == WILD["max_tokens"]
            for response in responses:
                assert response.text == group_text(token_bytes, response.token_ids)
        if settings is of_the_prompts_tokens:
            assert expected[prompt].isascii() == prompt.isascii()
        whole = complete(http_url, text_input=prompt, sampling_parameters=as_vllm(sampling[prompt]))
        assert whole["text_output"] == expected[prompt], prompt
        assert whole["finish_reason"] == ("stop" if settings is stopped else "length")


def test_server_sent_events_are_the_same_stream(http_url: str) -> None:
    url = f"{http_url}/v2/models/grok1_generate/generate_stream"
    events = post(url, {"text_input": PROMPTS[2], **WILD}).events
    whole = complete(http_url, text_input=PROMPTS[2], **WILD)
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert [event["finish_reason"] for event in events][-1] == "length"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("model", STREAMING)
def test_the_prompt_comes_back_as_it_was(grpc_url: str, model: str, prompt: str) -> None:
    settings = {"max_tokens": 3, "temperature": 0.0}
    without = text_of(ask(grpc_url, model, text_input=prompt, **settings))
    echo = ask(grpc_url, model, text_input=prompt, exclude_input_in_output=False, **settings)
    assert text_of(echo) == prompt + without


def test_a_stop_word_ends_the_text_before_it(grpc_url: str, http_url: str) -> None:
    greedy = {"text_input": "In the beginning", "temperature": 0.0, "max_tokens": 40}
    text = complete(http_url, **greedy)["text_output"]
    stop = text[len(text) // 2 :][:3]
    expected = text[: text.index(stop)]
    for model in STREAMING:
        responses = ask(grpc_url, model, stop_words=[stop], **greedy)
        assert text_of(responses) == expected
        assert responses[-1].value("finish_reason") == "stop"
    assert complete(http_url, stop_words=[stop], **greedy)["text_output"] == expected


def test_token_ids_in_place_of_text(grpc_url: str) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 8}
    with Stream(grpc_url) as stream:
        ids = [5, 300, 17, 42]
        direct = stream.ask("grok1", options=one_shot(99), input_ids=ids, **greedy)
    for model in STREAMING:
        assert tokens_of(ask(grpc_url, model, input_ids=ids, **greedy)) == tokens_of(direct)


def test_one_request_with_several_prompts_gets_as_many_answers_in_order(http_url: str) -> None:
    prompts, limits = PROMPTS[:4], [3, 9, 1, 6]
    text = http.InferInput("text_input", [4, 1], "BYTES")
    text.set_data_from_numpy(np.array([[p.encode()] for p in prompts], dtype=object))
    limit = http.InferInput("max_tokens", [4, 1], "INT32")
    limit.set_data_from_numpy(np.array(limits, np.int32)[:, None])
    cold = http.InferInput("temperature", [4, 1], "FP32")
    cold.set_data_from_numpy(np.zeros((4, 1), np.float32))
    with http.InferenceServerClient(http_url.removeprefix("http://")) as client:
        result = client.infer("grok1_complete", [text, limit, cold])
    for row, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
        alone = complete(http_url, text_input=prompt, max_tokens=most, temperature=0.0)
        assert result.as_numpy("text_output")[row].item().decode() == alone["text_output"]
        count = result.as_numpy("num_output_tokens")[row].item()
        assert count == alone["num_output_tokens"] <= most
        assert (result.as_numpy("token_ids")[row, count:] == -1).all()


def test_log_probs_are_there_when_asked_for(grpc_url: str) -> None:
    responses = ask(
        grpc_url, "grok1_generate", text_input="In the beginning", max_tokens=6, temperature=0.0,
        return_log_probs=True, return_top_tokens=2, return_prompt_log_probs=True,
    )  # fmt: skip
    log_probs = np.concatenate([r.outputs["output_log_probs"][0] for r in responses])
    assert len(log_probs) == len(tokens_of(responses))
    assert responses[-1].value("cum_log_probs") == pytest.approx(log_probs.sum(), rel=1e-4)
    best = np.concatenate([r.outputs["top_token_ids"][0] for r in responses])
    assert best[:, 0].tolist() == tokens_of(responses)
    assert (best[:, 2:] == -1).all()
    first, rest = responses[0], responses[1:]
    count = first.value("num_input_tokens")
    assert first.outputs["prompt_log_probs"].shape == (1, count)
    assert first.outputs["prompt_top_ids"].shape == (1, count, 8)
    best = first.outputs["prompt_top_log_probs"][0]
    assert best.shape == (count, 8)
    assert (best[:, 0] >= first.outputs["prompt_log_probs"][0]).all()
    assert not any(name.startswith("prompt_") for r in rest for name in r.outputs)


@pytest.mark.parametrize("model", ["grok1_generate", "grok1_ensemble"])
def test_scores_are_left_out_unless_asked_for(grpc_url: str, model: str) -> None:
    """Each tensor of a response takes the server's time, and the client's."""
    responses = ask(grpc_url, model, text_input="In the beginning", max_tokens=3)
    assert responses
    names = {output.name for output in TEXT_OUTPUTS if not output.optional}
    assert all(response.outputs.keys() == names for response in responses)


def test_scores_are_left_out_of_a_whole_answer(http_url: str) -> None:
    """Not where one of its prompts asked for them: then they are there for all."""
    assert "output_log_probs" not in complete(http_url, text_input="And", max_tokens=2)
    text = http.InferInput("text_input", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([["And"], ["But"]], object))
    wanted = http.InferInput("return_log_probs", [2, 1], "BOOL")
    wanted.set_data_from_numpy(np.array([[False], [True]]))
    limit = http.InferInput("max_tokens", [2, 1], "INT32")
    limit.set_data_from_numpy(np.full((2, 1), 3, np.int32))
    with http.InferenceServerClient(http_url.removeprefix("http://")) as client:
        result = client.infer("grok1_complete", [text, wanted, limit])
    log_probs = result.as_numpy("output_log_probs")
    assert not log_probs[0].any()
    assert (log_probs[1] < 0).all()
    assert result.as_numpy("top_token_ids") is None


def test_settings_as_parameters_and_as_vllms_json(http_url: str) -> None:
    expected = complete(http_url, text_input="And", max_tokens=5, temperature=0.0)["token_ids"]
    nested = complete(http_url, text_input="And", parameters={"max_tokens": 5, "temperature": 0})
    text = '{"max_tokens": "5", "temperature": "0", "n": 1}'
    as_json = complete(http_url, text_input="And", sampling_parameters=text)
    assert nested["token_ids"] == as_json["token_ids"] == expected


def test_only_requested_outputs_are_sent(http_url: str) -> None:
    prompt = http.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[b"And"]], dtype=object))
    with http.InferenceServerClient(http_url.removeprefix("http://")) as client:
        result = client.infer(
            "grok1_complete", [prompt], outputs=[http.InferRequestedOutput("text_output")]
        )
    assert [output["name"] for output in result.get_response()["outputs"]] == ["text_output"]
