"""What the server's tests ask it by: gRPC streams, and JSON over HTTP."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from grok1_backend.triton.interface import MODELS, NUMPY

SECONDS = 60
INPUTS = {field.name: field for model in MODELS.values() for field in model.inputs}


def tensor(name: str, value: Any) -> grpc.InferInput:
    """An input of one prompt: a scalar, or a list of values."""
    field = INPUTS[name]
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    array = np.array([values], dtype=NUMPY[field.data_type])
    kind = {"TYPE_STRING": "BYTES"}.get(field.data_type, field.data_type.removeprefix("TYPE_"))
    made = grpc.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


@dataclass(frozen=True)
class Response:
    """One response of a stream."""

    outputs: dict[str, np.ndarray]
    request_id: str
    final: bool

    @property
    def text(self) -> str:
        return self.outputs["text_output"].item().decode() if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        return self.outputs["token_ids"].reshape(-1).tolist() if self.outputs else []

    def value(self, name: str) -> Any:
        """A scalar output."""
        value = self.outputs[name].item()
        return value.decode() if isinstance(value, bytes) else value


def text_of(responses: list[Response]) -> str:
    return "".join(response.text for response in responses)


def tokens_of(responses: list[Response]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


class Stream:
    """A gRPC stream; requests are answered one after the other, or mixed, by request id."""

    def __init__(self, url: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream and whatever still runs on it."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, model: str, *, options: dict[str, Any] | None = None, **inputs: Any) -> None:
        """Sends a request; `options` are those of tritonclient (sequence_id, timeout, ...)."""
        self._client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            enable_empty_final_response=True,
            **(options or {}),
        )

    def receive(self) -> Response:
        """The next response of any request of the stream.

        Raises:
          InferenceServerException: the server answered with an error.
        """
        result, error = self._answers.get(timeout=SECONDS)
        if error is not None:
            raise error
        answer = result.get_response()
        return Response(
            {output.name: result.as_numpy(output.name) for output in answer.outputs},
            answer.id,
            answer.parameters["triton_final_response"].bool_param,
        )

    def responses(self) -> Iterator[Response]:
        """The responses of one request, up to the final one."""
        final = False
        while not final:
            response = self.receive()
            final = response.final
            yield response

    def collect(self, requests: int) -> dict[str, list[Response]]:
        """All responses of so many requests that were sent, by request id, in their order."""
        answers: dict[str, list[Response]] = {}
        while requests:
            response = self.receive()
            answers.setdefault(response.request_id, []).append(response)
            requests -= response.final
        return answers

    def ask(
        self, model: str, *, options: dict[str, Any] | None = None, **inputs: Any
    ) -> list[Response]:
        """Sends a request and waits for all its responses."""
        self.send(model, options=options, **inputs)
        return list(self.responses())

    def is_silent(self) -> bool:
        """Whether nothing is left that was received and not asked for."""
        return self._answers.empty()


def one_shot(correlation_id: int | str) -> dict[str, Any]:
    """Options of a sequence of one request."""
    return {"sequence_id": correlation_id, "sequence_start": True, "sequence_end": True}


@dataclass(frozen=True)
class HttpAnswer:
    """Status and body of an HTTP call."""

    status: int
    body: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The server-sent events."""
        return [json.loads(data) for data in re.findall(r"^data: ?(.*)$", self.body, re.MULTILINE)]


def post(url: str, body: dict[str, Any]) -> HttpAnswer:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return HttpAnswer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return HttpAnswer(error.code, error.read().decode())


def metric(url: str, name: str) -> float:
    """A metric's value, summed over its labels."""
    with urllib.request.urlopen(url, timeout=SECONDS) as response:
        page = response.read().decode()
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    assert found, f"there is no metric {name}"
    return sum(map(float, found))


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
