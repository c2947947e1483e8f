"""Requests as clients send them become the engine's, or are refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import SessionTurn
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.triton.parsing import ClientRequest, Generation, RequestParser

TOKENIZER = Tokenizer(Path(__file__).resolve().parents[2] / "embedded_model" / "tokenizer.model")
PARSER = RequestParser(
    end_ids=(2,), default_max_tokens=16, tokenizer=TOKENIZER, clock=lambda: 1000.0
)


def tensors(**values: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"input_ids": np.array([[5, 6]], np.int32)}
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], str | bytes):
            words = [v if isinstance(v, bytes) else v.encode() for v in value]
            made[name] = np.array([words], dtype=object)
        elif isinstance(value, str | bytes):
            text = value if isinstance(value, bytes) else value.encode()
            made[name] = np.array([[text]], dtype=object)
        else:
            made[name] = np.array([value] if isinstance(value, list) else [[value]])
    return made


def parse(parameters: dict[str, Any] | None = None, /, **values: Any) -> Generation:
    return PARSER.parse(ClientRequest(tensors=tensors(**values), parameters=parameters or {}))


def parse_json(**settings: Any) -> Generation:
    return parse(sampling_parameters=json.dumps(settings))


def refusal(*args: Any, **values: Any) -> str:
    with pytest.raises(EngineError) as caught:
        parse(*args, **values)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_defaults() -> None:
    generation = parse()
    request = generation.request
    assert request.prompt == (5, 6)
    assert request.sampling.max_tokens == 16
    assert request.sampling.end_ids is None
    assert request.stream
    assert request.session is None
    assert request.deadline is None
    assert request.request_id != parse().request.request_id
    assert (generation.return_log_probs, generation.return_top_tokens) == (False, 0)
    assert generation.prompt_text == ""


def test_every_setting_arrives() -> None:
    generation = parse(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125,
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, seed=2**64 - 1,
        stop_words=["end", "é"], end_id=9, ignore_eos=True, return_log_probs=True,
        return_top_tokens=4, return_prompt_log_probs=True, priority=-3, stream=False,
    )  # fmt: skip
    request, sampling = generation.request, generation.request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (7, 2, 3)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.seed == 2**64 - 1
    assert sampling.stop_words == (b"end", "é".encode())
    assert (sampling.end_ids, sampling.ignore_eos) == ((9,), True)
    assert (generation.return_log_probs, generation.return_top_tokens) == (True, 4)
    assert (request.return_prompt_log_probs, request.priority, request.stream) == (True, -3, False)


def test_words_become_tokens() -> None:
    sampling = parse(
        bad_words=["king"], embedding_bias_words=["lord"], embedding_bias_weights=[2.5]
    ).request.sampling
    assert tuple(TOKENIZER.encode(" king", continuation=True)) in sampling.bad_words
    biased = dict(sampling.logit_bias)
    assert all(biased[i] == 2.5 for i in TOKENIZER.encode(" lord", continuation=True))


def test_a_tensor_goes_before_a_parameter_and_that_before_json() -> None:
    text = json.dumps({"top_k": 1, "temperature": 0.25, "max_tokens": 3})
    sampling = parse(
        {"temperature": 0.5, "max_tokens": 4}, sampling_parameters=text, max_tokens=5
    ).request.sampling
    assert (sampling.top_k, sampling.temperature, sampling.max_tokens) == (1, 0.5, 5)


def test_json_in_vllms_names() -> None:
    generation = parse_json(
        n=1, best_of=None, temperature="0.5", top_k=-1, max_tokens="12", stop="end",
        stop_token_ids=[7], logprobs=3, logit_bias={"5": 1.5}, allowed_token_ids=[5, 6],
        ignore_eos=True, skip_special_tokens=True, seed=4, bad_words=["king"],
    )  # fmt: skip
    sampling = generation.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 0, 12)
    assert sampling.stop_words == (b"end",)
    assert sampling.end_ids == (2, 7)
    assert sampling.logit_bias == ((5, 1.5),)
    assert sampling.allowed_token_ids == (5, 6)
    assert (sampling.seed, sampling.ignore_eos) == (4, True)
    assert sampling.bad_words
    assert (generation.return_log_probs, generation.return_top_tokens) == (True, 3)


def test_prompt_log_probs_alone_need_no_token() -> None:
    request = parse_json(prompt_logprobs=1, max_tokens=0).request
    assert request.return_prompt_log_probs
    assert request.sampling.max_tokens == 0


def test_the_prompts_text_is_handed_on_where_it_is_wanted() -> None:
    assert parse(exclude_input_in_output=False, prompt_text="hello").prompt_text == "hello"
    assert parse(prompt_text="hello").prompt_text == ""
    assert "prompt_text" in refusal(exclude_input_in_output=False)


@pytest.mark.parametrize(
    ("timeout", "parameters", "deadline"),
    [(0, {}, None), (1_500_000, {}, 1001.5), (0, {"timeout": 500_000}, 1000.5)],
)
def test_a_timeout_is_a_deadline(
    timeout: int, parameters: dict[str, Any], deadline: float | None
) -> None:
    client = ClientRequest(tensors=tensors(), timeout=timeout, parameters=parameters)
    assert PARSER.parse(client).request.deadline == deadline


@pytest.mark.parametrize("correlation_id", [7, "d7fce3f4-2a3f-4c50-ae26-6c6a4b8e4d41"])
def test_a_turn_of_a_sequence(correlation_id: int | str) -> None:
    client = ClientRequest(tensors=tensors(), correlation_id=correlation_id, start=True)
    turn = SessionTurn(correlation_id=correlation_id, start=True, end=False)
    assert PARSER.parse(client).request.session == turn


def test_parameters_of_tritons_own_are_let_through() -> None:
    assert parse({"id": "x", "triton_enable_empty_final_response": True})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stop_words": [b"\xff"]}, ("stop_words", "UTF-8")),
        ({"stop_words": [""]}, ("stop_words", "1 to")),
        ({"stop_words": ["x"] * 10_000}, ("stop_words", "10000", "at most 64")),
        ({"bad_words": ["king"] * 2 + [f"w{i}" for i in range(99)]}, ("bad_words", "at most")),
        ({"embedding_bias_words": ["a"]}, ("embedding_bias_weights", "as many")),
        ({"embedding_bias_weights": [1.0]}, ("embedding_bias_weights", "as many")),
        ({"return_top_tokens": 9}, ("return_top_tokens is 9", "0 to 8")),
        ({"max_tokens": 0}, ("max_tokens is 0", "at least 1")),
        ({"max_tokens": 4, "min_tokens": 5}, ("min_tokens is 5", "max_tokens (4)")),
        ({"sampling_parameters": "[1]"}, ("sampling_parameters", "JSON object")),
        ({"sampling_parameters": "{"}, ("sampling_parameters", "JSON object")),
        ({"sampling_parameters": b"\xff"}, ("sampling_parameters", "UTF-8")),
    ],
)
def test_what_is_refused(values: dict[str, Any], said: tuple[str, ...]) -> None:
    message = refusal(**values)
    assert all(word in message for word in said), message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temprature": 1}, ("temprature", "did you mean temperature?")),
        ({"n": 2}, ("n in sampling_parameters is 2", "1 is the only value")),
        ({"seed": -1}, ("seed is -1", "0 to 18446744073709551615")),
        ({"seed": 2**64}, ("seed is", "0 to 18446744073709551615")),
        ({"max_tokens": 1.5}, ("max_tokens", "an integer")),
        ({"max_tokens": True}, ("max_tokens", "an integer")),
        ({"temperature": "hot"}, ("temperature", "a number")),
        ({"temperature": float("nan")}, ("temperature is nan", "finite")),
        ({"ignore_eos": "maybe"}, ("ignore_eos", "true or false")),
        ({"stop": [1]}, ("stop", "a string")),
        ({"stop": ["\ud800"]}, ("stop", "no surrogate code point, as there is at index 0")),
        ({"stop_token_ids": "x"}, ("stop_token_ids", "an integer")),
        ({"logit_bias": [1]}, ("logit_bias", "JSON object")),
        ({"logprobs": 9}, ("return_top_tokens is 9", "0 to 8")),
    ],
)
def test_what_is_refused_in_json(settings: dict[str, Any], said: tuple[str, ...]) -> None:
    message = refusal(sampling_parameters=json.dumps(settings))
    assert all(word in message for word in said), message


def test_an_unknown_parameter_is_refused() -> None:
    assert "did you mean max_tokens?" in refusal({"max_token": 3})


def test_a_missing_or_empty_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="input_ids is None: a prompt is needed"):
        PARSER.parse(ClientRequest(tensors={}))
    with pytest.raises(EngineError, match="at least one token id"):
        PARSER.parse(ClientRequest(tensors={"input_ids": np.empty((1, 0), np.int32)}))


def test_words_need_a_tokenizer() -> None:
    parser = RequestParser(end_ids=(2,), default_max_tokens=16)
    with pytest.raises(EngineError, match="no tokenizer"):
        parser.parse(ClientRequest(tensors=tensors(bad_words=["x"])))
