"""Clients that go away, and requests that are aborted: what they held is free at once."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
from generation import Stream, eventually, metric, one_shot, post, text_of
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

LONG = {"text_input": "In the beginning", "max_tokens": 8000, "ignore_eos": True}
SHORT = {"text_input": "In the beginning", "max_tokens": 4, "temperature": 0.0}
EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"


@pytest.fixture
def is_free(metrics_url: str) -> Callable[[], bool]:
    """Whether no request holds anything, asked with the second that it may take."""

    def no_request_is_left() -> bool:
        names = ("grok1_requests_running", "grok1_requests_waiting", "grok1_kv_pages_used")
        return all(metric(metrics_url, name) == 0 for name in names)

    return lambda: eventually(no_request_is_left, 1.5)


def running(metrics_url: str, count: int = 1) -> bool:
    return eventually(lambda: metric(metrics_url, "grok1_requests_running") >= count, 20)


def test_a_grpc_stream_that_is_cancelled(
    grpc_url: str, metrics_url: str, is_free: Callable[[], bool]
) -> None:
    with Stream(grpc_url) as other:
        stream = Stream(grpc_url)
        stream.send("grok1_generate", **LONG)
        stream.receive()
        assert running(metrics_url)
        stream.cancel()
        assert is_free()
        assert other.ask("grok1_generate", **SHORT)


def test_other_streams_are_unharmed(grpc_url: str) -> None:
    settings = {"text_input": "And", "max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    with Stream(grpc_url) as other:
        alone = text_of(other.ask("grok1_generate", **settings))
        other.send("grok1_generate", **settings)
        for _ in range(5):
            stream = Stream(grpc_url)
            stream.send("grok1_generate", **LONG)
            stream.receive()
            stream.cancel()
        assert text_of(list(other.responses())) == alone


def test_a_queued_request_that_is_cancelled(
    grpc_url: str, metrics_url: str, is_free: Callable[[], bool]
) -> None:
    slots = int(metric(metrics_url, "grok1_slots"))
    holders, waiter = Stream(grpc_url), Stream(grpc_url)
    for _ in range(slots):
        holders.send("grok1_generate", **LONG)
    assert running(metrics_url, slots)
    waiter.send("grok1_generate", **LONG)
    assert eventually(lambda: metric(metrics_url, "grok1_requests_waiting") == 1, 5)
    waiter.cancel()
    assert eventually(lambda: metric(metrics_url, "grok1_requests_waiting") == 0, 1.5)
    holders.cancel()
    assert is_free()


def test_an_http_client_that_goes_in_mid_stream(
    http_url: str, metrics_url: str, is_free: Callable[[], bool]
) -> None:
    address = urlparse(http_url)
    body = json.dumps(LONG).encode()
    head = "POST /v2/models/grok1_generate/generate_stream HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert running(metrics_url)
    assert is_free()


def test_a_client_that_is_killed(
    grpc_url: str, metrics_url: str, is_free: Callable[[], bool]
) -> None:
    command = [sys.executable, str(EXAMPLES / "grpc_stream.py"), "--url", grpc_url]
    client = subprocess.Popen([*command, "--max-tokens", "8000"], stdout=subprocess.PIPE)
    assert running(metrics_url)
    client.send_signal(signal.SIGKILL)
    client.communicate()
    assert is_free()


def test_a_grpc_infer_that_is_cancelled(
    grpc_url: str, metrics_url: str, is_free: Callable[[], bool]
) -> None:
    prompt = grpc.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[b"a"]], dtype=object))
    limit = grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[8000]], np.int32))
    answered = threading.Event()
    with grpc.InferenceServerClient(grpc_url) as client:
        call = client.async_infer("grok1_complete", [prompt, limit], lambda **_: answered.set())
        assert running(metrics_url)
        call.cancel()
        assert answered.wait(5)
        assert is_free()


def test_a_request_of_the_ensemble_is_aborted_by_its_id(
    grpc_url: str, is_free: Callable[[], bool]
) -> None:
    with Stream(grpc_url) as stream, Stream(grpc_url) as control:
        options = {**one_shot("to abort"), "request_id": "mine"}
        stream.send("grok1_ensemble", options=options, **LONG)
        stream.receive()
        (answer,) = control.ask("grok1", options=one_shot("control"), abort="mine")
        assert answer.value("finish_reason") == "cancelled"
        assert answer.value("request_id") == "mine"
        with pytest.raises(InferenceServerException, match="'mine' was cancelled"):
            list(stream.responses())
        assert is_free()


def test_an_id_that_was_made_up_can_be_aborted(grpc_url: str, is_free: Callable[[], bool]) -> None:
    with Stream(grpc_url) as stream, Stream(grpc_url) as control:
        stream.send("grok1_ensemble", options=one_shot("nameless"), **LONG)
        request_id = stream.receive().value("request_id")
        control.ask("grok1", options=one_shot("control"), abort=request_id)
        with pytest.raises(InferenceServerException, match="cancelled"):
            list(stream.responses())
    assert is_free()


def test_to_abort_an_unknown_id_is_no_error_and_opens_no_session(
    grpc_url: str, metrics_url: str
) -> None:
    with Stream(grpc_url) as control:
        for _ in range(2):
            (answer,) = control.ask("grok1", options=one_shot("control"), abort="nobody")
            assert answer.value("finish_reason") == ""
    assert metric(metrics_url, "grok1_sessions") == 0


def test_many_cancels_at_random_moments(
    grpc_url: str, http_url: str, is_free: Callable[[], bool]
) -> None:
    chance = random.Random(5)
    moments = [[chance.uniform(0, 0.15) for _ in range(25)] for _ in range(8)]

    def cancel_again_and_again(waits: list[float]) -> None:
        for wait in waits:
            stream = Stream(grpc_url)
            stream.send("grok1_generate", **LONG)
            time.sleep(wait)
            stream.cancel()

    threads = [threading.Thread(target=cancel_again_and_again, args=(w,)) for w in moments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(is_free, 10)
    answer = post(f"{http_url}/v2/models/grok1_complete/generate", SHORT)
    assert (answer.status, answer.json["num_output_tokens"]) == (200, 4)
