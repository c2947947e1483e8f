"""Clients that go away, and a gateway that is stopped: nothing goes on in the server."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import openai
import pytest
from gateways import NAME, Gateway, is_free, launch, running
from generation import SECONDS, HttpAnswer
from openai import OpenAI

LONG: dict[str, Any] = {"model": NAME, "prompt": "In the beginning", "max_tokens": 8000}
FOR_EVER = {"ignore_eos": True}


def post(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    address = urlparse(url)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((address.hostname or "", address.port or 0))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_goes(gateway: Gateway, metrics_url: str, stream: bool, count: int) -> None:
    with post(gateway.url, {**LONG, **FOR_EVER, "stream": stream, "n": count}) as connection:
        assert running(metrics_url, count)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert is_free(metrics_url)


def test_a_client_that_does_not_read_and_goes(gateway: Gateway, metrics_url: str) -> None:
    body = {**LONG, **FOR_EVER, "stream": True, "n": 4, "logprobs": 8, "temperature": 2}
    with post(gateway.url, body) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        assert running(metrics_url, 4)
        assert gateway.get("/health").status == 200
    assert is_free(metrics_url)


def test_a_client_that_closes_its_stream(
    client: OpenAI, gateway: Gateway, metrics_url: str
) -> None:
    settings: dict[str, Any] = {"model": NAME, "prompt": "And", "max_tokens": 200}
    settings |= {"temperature": 0, "extra_body": FOR_EVER}
    alone = client.completions.create(**settings).choices[0].text
    other = client.completions.create(stream=True, **settings)
    for _ in range(5):
        with client.completions.create(**settings | {"max_tokens": 8000}, stream=True) as stream:
            next(iter(stream))
    assert "".join(chunk.choices[0].text for chunk in other) == alone
    assert is_free(metrics_url)
    assert gateway.get("/health").status == 200


def test_an_error_ends_the_others_of_its_request(gateway: Gateway, metrics_url: str) -> None:
    fits, does_not_fit = [5] * 10, [5] * 4000
    answer = gateway.complete(prompt=[fits, fits, does_not_fit], max_tokens=6000, ignore_eos=True)
    assert answer.status == 400
    assert "4000 + 6000" in answer.json["error"]["message"]
    assert is_free(metrics_url)


@pytest.fixture
def own_gateway(grpc_url: str) -> Iterator[Gateway]:
    with launch(grpc_url, "--exit-timeout", "1") as running:
        yield running


def test_a_gateway_that_is_stopped_ends_its_streams(own_gateway: Gateway, metrics_url: str) -> None:
    url = f"{own_gateway.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = client.completions.create(**LONG, extra_body=FOR_EVER, stream=True)
        next(iter(stream))
        whole: list[HttpAnswer] = []

        def ask_whole() -> None:
            whole.append(own_gateway.complete(**LONG, **FOR_EVER))

        thread = threading.Thread(target=ask_whole)
        thread.start()
        assert running(metrics_url, 2)
        own_gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the gateway is stopping"):
            list(stream)
        thread.join()
    assert whole[0].status == 503
    assert own_gateway.process.wait(SECONDS) == 0
    assert is_free(metrics_url)
