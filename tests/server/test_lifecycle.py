"""Models are drained, unloaded and loaded while the server runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from generation import Stream, eventually, one_shot, post
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from grok1_backend.server import TritonServer

SHORT = {"text_input": "And", "max_tokens": 3, "ignore_eos": True}
COMPLETE = "/v2/models/grok1_complete/generate"


def state(http_url: str, model: str) -> str:
    index = json.loads(post(f"{http_url}/v2/repository/index", {}).body)
    found: list[dict[str, Any]] = [entry for entry in index if entry["name"] == model]
    return str(found[0].get("state", ""))


@pytest.fixture
def http_url(own_server: TritonServer) -> str:
    return own_server.options.http_url


@pytest.fixture
def grpc_url(own_server: TritonServer) -> str:
    return own_server.options.grpc_url


def test_an_adapter_is_unloaded_and_loaded(http_url: str, grpc_url: str) -> None:
    with grpc.InferenceServerClient(grpc_url) as client:
        client.unload_model("grok1_generate")
        assert eventually(lambda: state(http_url, "grok1_generate") == "UNAVAILABLE", 30)
        assert post(f"{http_url}{COMPLETE}", SHORT).status == 200
        client.load_model("grok1_generate")
    with Stream(grpc_url) as stream:
        assert stream.ask("grok1_generate", **SHORT)[-1].value("num_output_tokens") == 3


@pytest.mark.slow
def test_the_engine_is_drained_unloaded_and_loaded(http_url: str, grpc_url: str) -> None:
    with Stream(grpc_url) as stream, Stream(grpc_url) as control:
        stream.send("grok1_generate", text_input="And", max_tokens=8000, ignore_eos=True)
        stream.receive()
        (drained,) = control.ask("grok1", options=one_shot("drain"), drain=0.2)
        assert drained.final
        with pytest.raises(InferenceServerException, match="the engine is draining"):
            list(stream.responses())
    refused = post(f"{http_url}{COMPLETE}", SHORT)
    assert (refused.status, "draining" in refused.body) == (400, True)
    with grpc.InferenceServerClient(grpc_url) as client:
        client.unload_model("grok1")
        assert eventually(lambda: state(http_url, "grok1") == "UNAVAILABLE", 30)
        gone = post(f"{http_url}{COMPLETE}", SHORT)
        assert (gone.status, "not ready" in gone.body) == (400, True)
        client.load_model("grok1", client_timeout=600)
    assert post(f"{http_url}{COMPLETE}", SHORT).json["num_output_tokens"] == 3
