"""Bad requests: the right code, a sentence that names field, value and limit, and on it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from generation import Stream, eventually, metric, one_shot, post
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException

from grok1_backend.server.health import probe

NAN = float("nan")

# Settings, and what the refusal must say.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "empty prompt": ({"text_input": ""}, ("text_input is ''", "not empty")),
    "no prompt": ({"max_tokens": 3}, ("the prompt", "text_input and input_ids")),
    "two prompts": ({"text_input": "a", "input_ids": [5]}, ("the prompt", "one of text_input")),
    "prompt not UTF-8": ({"text_input": b"ab\xff"}, ("text_input", "UTF-8", "byte 2")),
    "prompt too long": ({"input_ids": [5] * 8192}, ("8192",)),
    "prompt and output too long": (
        {"input_ids": [5] * 8000, "max_tokens": 500},
        ("max_tokens", "500", "8192"),
    ),
    "huge max_tokens": ({"text_input": "a", "max_tokens": 2**31 - 1}, ("2147483647", "8192")),
    "negative max_tokens": ({"text_input": "a", "max_tokens": -1}, ("max_tokens is -1",)),
    "zero max_tokens": ({"text_input": "a", "max_tokens": 0}, ("max_tokens is 0", "at least 1")),
    "min above max": (
        {"text_input": "a", "max_tokens": 2, "min_tokens": 3},
        ("min_tokens is 3", "max_tokens (2)"),
    ),
    "negative temperature": ({"text_input": "a", "temperature": -1.0}, ("temperature is -1.0",)),
    "temperature NaN": ({"text_input": "a", "temperature": NAN}, ("temperature is nan", "finite")),
    "top_p too large": ({"text_input": "a", "top_p": 1.5}, ("top_p is 1.5", "0 to 1")),
    "negative top_k": ({"text_input": "a", "top_k": -2}, ("top_k is -2",)),
    "repetition penalty zero": (
        {"text_input": "a", "repetition_penalty": 0.0},
        ("repetition_penalty is 0.0", "0.01 to 100"),
    ),
    "token id outside the vocabulary": ({"input_ids": [5, 10**6]}, ("1000000",)),
    "negative token id": ({"input_ids": [-1]}, ("-1",)),
    "end id outside the vocabulary": ({"text_input": "a", "end_id": 10**6}, ("1000000",)),
    "empty stop word": ({"text_input": "a", "stop_words": [""]}, ("stop_words", "1 to")),
    "10,000 stop words": (
        {"text_input": "a", "stop_words": ["x"] * 10_000},
        ("stop_words", "10000", "at most 64"),
    ),
    "biases without words": (
        {"text_input": "a", "embedding_bias_weights": [1.0]},
        ("embedding_bias_weights",),
    ),
    "seed below zero": (
        {"text_input": "a", "sampling_parameters": '{"seed": -1}'},
        ("seed is -1", "0 to 18446744073709551615"),
    ),
    "JSON that is none": (
        {"text_input": "a", "sampling_parameters": "{"},
        ("sampling_parameters", "JSON object"),
    ),
    "unknown setting": (
        {"text_input": "a", "sampling_parameters": '{"temprature": 1}'},
        ("temprature", "did you mean temperature?"),
    ),
}
MODELS = ("grok1_generate", "grok1_complete", "grok1_ensemble")
GOOD = {"text_input": "In the beginning", "max_tokens": 2}


@pytest.fixture
def stream(grpc_url: str) -> Iterator[Stream]:
    with Stream(grpc_url) as stream:
        yield stream


def refusal(stream: Stream, model: str, **inputs: Any) -> InferenceServerException:
    options = one_shot("bad") if model == "grok1_ensemble" else None
    with pytest.raises(InferenceServerException) as caught:
        stream.ask(model, options=options, **inputs)
    return caught.value


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_in_words(stream: Stream, model: str, case: str) -> None:
    inputs, said = BAD[case]
    if (case, model) == ("no prompt", "grok1_ensemble"):
        said = ("request has 0 inputs",)  # Triton refuses it before the first step
    message = str(refusal(stream, model, **inputs))
    assert all(words in message for words in said), message
    options = one_shot("good") if model == "grok1_ensemble" else None
    assert stream.ask(model, options=options, **GOOD)[-1].value("num_output_tokens") == 2


@pytest.mark.parametrize(
    "case", [c for c in BAD if c not in ("temperature NaN", "prompt not UTF-8")]
)
def test_a_bad_request_over_http_is_refused_in_words(http_url: str, case: str) -> None:
    inputs, said = BAD[case]
    answer = post(f"{http_url}/v2/models/grok1_complete/generate", inputs)
    assert answer.status == 400, answer.body
    assert all(words in answer.json["error"] for words in said), answer.body
    (event,) = post(f"{http_url}/v2/models/grok1_generate/generate_stream", inputs).events
    assert all(words in event["error"] for words in said), event


def test_the_code_of_a_refusal_over_grpc(grpc_url: str) -> None:
    with grpc.InferenceServerClient(grpc_url) as client:
        prompt = grpc.InferInput("text_input", [1, 1], "BYTES")
        prompt.set_data_from_numpy(np.array([[b""]], dtype=object))
        with pytest.raises(InferenceServerException) as caught:
            client.infer("grok1_complete", [prompt])
    assert "INVALID_ARGUMENT" in str(caught.value.status())


def test_an_unknown_parameter_is_refused(http_url: str) -> None:
    answer = post(f"{http_url}/v2/models/grok1_complete/generate", {**GOOD, "max_token": 3})
    assert (answer.status, "did you mean max_tokens?" in answer.body) == (400, True)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [([1, 1], "FP64", np.float64), ([1, 2], "FP32", np.float32), ([1], "FP32", np.float32)],
)
def test_a_wrong_type_or_shape_is_refused(
    http_url: str, shape: list[int], kind: str, dtype: type
) -> None:
    prompt = http.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[b"a"]], dtype=object))
    temperature = http.InferInput("temperature", shape, kind)
    temperature.set_data_from_numpy(np.ones(shape, dtype))
    with (
        http.InferenceServerClient(http_url.removeprefix("http://")) as client,
        pytest.raises(InferenceServerException, match="temperature"),
    ):
        client.infer("grok1_complete", [prompt, temperature])


def test_a_batch_is_refused_where_none_is_allowed(http_url: str) -> None:
    # Over HTTP: a gRPC stream that sends this keeps the model from ever being unloaded again.
    url = f"{http_url}/v2/models/grok1_generate/generate_stream"
    answer = post(url, {"text_input": ["a", "b"]})
    assert "batch-size must be <= 1" in answer.body


@pytest.mark.parametrize(
    ("texts", "limits", "said"),
    [([b"a", b""], [3, 3], "text_input is ''"), ([b"a", b"b"], [8000, -1], "max_tokens is -1")],
)
def test_one_bad_prompt_of_several_is_the_answer_for_all(
    http_url: str, metrics_url: str, texts: list[bytes], limits: list[int], said: str
) -> None:
    prompts = http.InferInput("text_input", [2, 1], "BYTES")
    prompts.set_data_from_numpy(np.array([texts], dtype=object).T)
    most = http.InferInput("max_tokens", [2, 1], "INT32")
    most.set_data_from_numpy(np.array([limits], np.int32).T)
    with (
        http.InferenceServerClient(http_url.removeprefix("http://")) as client,
        pytest.raises(InferenceServerException, match=said),
    ):
        client.infer("grok1_complete", [prompts, most])
    assert eventually(lambda: metric(metrics_url, "grok1_requests_running") == 0, 60)


def test_stream_true_is_refused_by_the_model_that_cannot(http_url: str) -> None:
    answer = post(f"{http_url}/v2/models/grok1_complete/generate", {**GOOD, "stream": True})
    assert answer.status == 400
    assert "grok1_generate" in answer.json["error"]


def test_an_id_in_use_is_refused(grpc_url: str, stream: Stream) -> None:
    twice = {"request_id": "twice"}
    stream.send("grok1_generate", options=twice, text_input="a", max_tokens=6000, ignore_eos=True)
    stream.receive()
    busy = pytest.raises(InferenceServerException, match="request_id is 'twice'")
    with Stream(grpc_url) as other, busy:
        other.ask("grok1_generate", options=twice, text_input="a")


@pytest.mark.parametrize("model", MODELS)
def test_a_deadline_ends_a_request(stream: Stream, model: str) -> None:
    sequence = one_shot("late") if model == "grok1_ensemble" else {}
    options = {**sequence, "timeout": 300_000}  # microseconds
    with pytest.raises(InferenceServerException, match="deadline has passed"):
        stream.ask(model, options=options, text_input="a", max_tokens=8000, ignore_eos=True)


def test_a_full_queue_refuses_at_once(grpc_url: str, metrics_url: str) -> None:
    sent = 1100  # more than the queue's 1024 and the slots together
    with Stream(grpc_url) as stream:
        for number in range(sent):
            stream.send(
                "grok1", options=one_shot(f"queued {number}"),
                input_ids=[5], max_tokens=8000, ignore_eos=True, stream=False,
            )  # fmt: skip
        with pytest.raises(InferenceServerException, match="the queue is full: 1024 requests wait"):
            stream.receive()
        assert "healthy, but busy: the queue is full" in probe(grpc_url, 30)
    names = ("grok1_requests_waiting", "grok1_requests_running")
    assert eventually(lambda: all(metric(metrics_url, name) == 0 for name in names), 5)
