"""What is refused, and what becomes of the server's own errors: OpenAI's statuses and bodies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from gateways import NAME, Gateway, launch
from generation import HttpAnswer
from openai import OpenAI
from tritonclient.grpc import service_pb2, service_pb2_grpc

from grok1_backend.cli import main
from grok1_backend.server.options import free_ports
from servers import EMBEDDED_MODEL

GOOD: dict[str, Any] = {"prompt": "In the", "max_tokens": 2}


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": ""}, "prompt", "prompt is '': at least one token"),
        ({"prompt": []}, "prompt", "prompt is []: a text, a list of texts"),
        ({"prompt": [[]]}, "prompt", "prompt is [[]]: a text, a list of texts"),
        ({"prompt": ["a", 1]}, "prompt", "prompt is ['a', 1]: a text, a list of texts"),
        ({"prompt": None}, "prompt", "prompt is None: a text, a list of texts"),
        ({"prompt": [5, 2048]}, "prompt", "prompt is 2048: token ids are 0 to 2047"),
        ({"prompt": [2**40]}, "prompt", "prompt is 1099511627776: token ids are 0 to 2047"),
        ({"prompt": "\ud800"}, None, "no surrogate code point, as there is at index 0"),
        ({"prompt": ["a"] * 65, "n": 2}, None, "130 answers: at most 128 in a request"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1: an integer from 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0: at least 1, or 0 with echo"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens is 2.5: input should be a valid integer"),
        ({"max_tokens": 9000}, None, "+ 9000 (prompt + max_tokens) asked, 8192 is the limit"),
        ({"temperature": -1}, "temperature", "temperature is -1.0: a finite number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan: a finite number"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot': input should be a valid"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5: a finite number from 0 to 1"),
        ({"min_p": True}, "min_p", "min_p is True: input should be a valid number"),
        ({"presence_penalty": 101}, "presence_penalty", "presence_penalty is 101.0: a finite"),
        ({"seed": 2**64}, "seed", "seed is 18446744073709551616: input should be less than"),
        ({"n": 0}, "n", "n is 0: input should be greater than or equal to 1"),
        ({"best_of": 2}, "best_of", "best_of is 2: the same as n (1), or left out"),
        ({"logprobs": 9}, "logprobs", "logprobs is 9: input should be less than or equal to 8"),
        ({"logprobs": True}, "logprobs", "logprobs is True: input should be a valid integer"),
        ({"stop": ""}, "stop", "stop is b'': 1 to 1024 bytes each"),
        ({"stop": ["x"] * 65}, "stop", "the number of stop is 65: at most 64"),
        ({"stop": "\ud800"}, "stop", "no surrogate code point, as there is at index 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias is 'x': an integer"),
        ({"logit_bias": {"5": 1e5}}, "logit_bias", "logit_bias is 100000.0: a finite number"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "a token of logit_bias is 5000: 0 to 2047"),
        ({"suffix": "x"}, "suffix", "suffix is 'x'"),
        ({"temprature": 1}, "temprature", "no such field here; did you mean temperature?"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named_with_value_and_limit(
    gateway: Gateway, fields: dict[str, Any], param: str | None, said: str, stream: bool
) -> None:
    answer = gateway.complete(**GOOD | {"stream": stream} | fields)
    error = error_of(answer)
    assert said in error["message"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "the body is no JSON"),
        ("", "the body is missing"),
        ([], "the body is []: input should be"),
        ({"prompt": "a"}, "model is missing"),
        ({"model": NAME}, "prompt is missing"),
        (
            {"model": NAME, "prompt": "a", "stream_options": {}},
            "stream_options are for requests with stream true only",
        ),
    ],
)
def test_a_bad_body(gateway: Gateway, body: Any, said: str) -> None:
    answer = gateway.post("/v1/completions", body)
    assert answer.status == 400
    assert said in error_of(answer)["message"]


def test_what_is_not_there(gateway: Gateway) -> None:
    for answer in (
        gateway.post("/v1/completions", {"model": "other", **GOOD}),
        gateway.get("/v1/models/other"),
    ):
        assert answer.status == 404
        error = error_of(answer)
        assert error["message"] == f"there is no model 'other' here: '{NAME}' is served"
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert gateway.get("/v1/engines").status == 404
    assert error_of(gateway.get("/v1/engines"))["message"] == "GET /v1/engines: Not Found"
    assert gateway.get("/v1/completions").status == 405


def test_the_client_raises_what_it_should(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_p is 2\.0") as raised:
        client.completions.create(model=NAME, prompt="a", top_p=2)
    assert raised.value.param == "top_p"
    with pytest.raises(openai.NotFoundError, match="there is no model 'x'"):
        client.completions.create(model="x", prompt="a")


class Pretender(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server whose streams send what they are told to, and end as they are told to."""

    def __init__(self) -> None:
        self.replies = 0
        self.code: grpc.StatusCode | None = None

    def ModelStreamInfer(self, requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        assert ("triton_grpc_error", "true") in context.invocation_metadata()
        for number in range(self.replies):
            yield reply(number + 1)
        if self.code is not None:
            context.abort(self.code, "its reason")


def reply(number: int) -> Any:
    """A response with one token of a text."""
    response = service_pb2.ModelInferResponse()
    for name, kind, content in (
        ("text_output", "BYTES", b"\x02\x00\x00\x00 a"),
        ("finish_reason", "BYTES", b"\x00\x00\x00\x00"),
        ("token_ids", "INT32", b"\x05\x00\x00\x00"),
        ("num_output_tokens", "INT32", number.to_bytes(4, "little")),
    ):
        response.outputs.add(name=name, datatype=kind, shape=[1, 1])
        response.raw_output_contents.append(content)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture(scope="module")
def pretender() -> Iterator[tuple[Pretender, Gateway]]:
    servicer = Pretender()
    with contextlib.ExitStack() as stack:
        server = grpc.server(stack.enter_context(ThreadPoolExecutor(2)))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        yield servicer, stack.enter_context(launch(f"127.0.0.1:{port}"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.UNAVAILABLE, 503),  # such as a full queue
        (grpc.StatusCode.NOT_FOUND, 503),
        (grpc.StatusCode.CANCELLED, 504),  # such as a deadline
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_the_servers_codes_have_a_status(
    pretender: tuple[Pretender, Gateway], code: grpc.StatusCode, status: int, stream: bool
) -> None:
    server, gateway = pretender
    server.replies, server.code = 0, code
    answer = gateway.complete(**GOOD, stream=stream)
    assert answer.status == status
    error = error_of(answer)
    assert error["message"] == "its reason"
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (grpc.StatusCode.INTERNAL, "its reason"),
        (None, "the server ended the answer without a reason"),
    ],
)
def test_an_error_in_mid_stream_is_its_last_event(
    pretender: tuple[Pretender, Gateway], code: grpc.StatusCode | None, said: str
) -> None:
    server, gateway = pretender
    server.replies, server.code = 2, code
    answer = gateway.complete(**GOOD, stream=True)
    assert answer.status == 200
    *chunks, last = answer.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" a", " a"]
    assert last["error"]["message"] == said
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in answer.body
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=NAME, stream=True, **GOOD)
        with pytest.raises(openai.APIError, match=said):
            list(stream)
    assert gateway.complete(**GOOD).status == 500


def test_a_server_that_is_not_there() -> None:
    (port,) = free_ports(1)
    with launch(f"127.0.0.1:{port}") as gateway:
        assert gateway.get("/health").status == 503
        answer = gateway.complete(**GOOD)
        assert answer.status == 503
        assert "failed to connect" in error_of(answer)["message"]


def test_many_bad_requests_at_once_leave_a_good_server(gateway: Gateway) -> None:
    bad = ({"top_p": 3}, {"prompt": ["a"] * 30 + [""]}, {"n": 4, "top_k": -2})
    statuses: list[int] = []

    def ask() -> None:
        statuses.extend(gateway.complete(**GOOD | fields).status for fields in bad)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [400] * 24
    assert gateway.complete(**GOOD).status == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere"], "there is no nowhere/tokenizer.model"),
        (["--chat-template", "nowhere"], "there is no chat template at nowhere"),
        (["--chat-template", "broken"], "broken is no Jinja2 template"),
    ],
)
def test_a_gateway_that_cannot_start_says_why(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken").write_text("{% if")
    monkeypatch.chdir(tmp_path)
    assert main(["openai", "--model", str(EMBEDDED_MODEL), *options]) == 1
    assert said in capsys.readouterr().err
