"""The engine in-process, without Triton: text by xAI's generator protocol, and an async stream.

The examples need an engine and its tokenizer:

>>> from grok1_backend.engine.build import ModelDirectory, build_engine  # doctest: +SKIP
>>> directory = ModelDirectory.read("embedded_model")  # doctest: +SKIP
>>> engine = build_engine(directory)  # doctest: +SKIP
>>> tokenizer = directory.tokenizer  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import GenerationRequest, SamplingParams, TokenEvent
from grok1_backend.text.stream import group_text


class TextCoder(Protocol):
    """What is needed of a `text.tokenizer.Tokenizer`."""

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it, in the words of xAI's research code."""

    prompt: str
    temperature: float = 1.0
    nucleus_p: float = 1.0
    rng_seed: int = 42
    max_len: int = 128
    """Tokens of the answer, at most."""


Server = Generator[str | list[str] | None, Request | Sequence[Request] | None, None]
"""What `InferenceRunner.run` gives."""


class InferenceRunner:
    """Text in, text out, on an engine that others may use at the same time.

    >>> server = InferenceRunner(engine, tokenizer).run()
    >>> next(server)
    >>> answer = server.send(Request(prompt="In the beginning", max_len=5))
    >>> isinstance(answer, str)
    True

    Several requests sent at once are computed together:

    >>> prompts = ("And God said", "It came to pass")
    >>> len(server.send([Request(prompt=prompt, max_len=5) for prompt in prompts]))
    2
    """

    def __init__(self, engine: Engine, tokenizer: TextCoder) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def run(self) -> Server:
        """A generator: `next` starts it, `send` takes a request and returns its text.

        `send` of several requests returns their texts, in order. A `next` in between, as xAI's
        code has it, does nothing. Each generator is one caller's; an engine can have many.

        Raises:
          EngineError: from `send`, if a request is refused or fails; the generator is over then.
        """
        asked: Request | Sequence[Request] | None = None
        while True:
            if asked is None:
                asked = yield None
            elif isinstance(asked, Request):
                asked = yield self._answer([asked])[0]
            else:
                asked = yield self._answer(asked)

    def _answer(self, requests: Sequence[Request]) -> list[str]:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        ids = [uuid.uuid4().hex for _ in requests]
        texts: dict[str, str] = {}
        try:
            for request_id, request in zip(ids, requests, strict=True):
                self._engine.submit(self._generation_request(request_id, request), events.put)
            while len(texts) < len(ids):
                event = events.get()
                if event.error is not None:
                    raise event.error
                texts[event.request_id] = group_text(
                    self._tokenizer.token_bytes, event.token_ids, event.text_trim
                )
        finally:
            for request_id in ids:
                if request_id not in texts:
                    self._engine.abort(request_id)
        return [texts[request_id] for request_id in ids]

    def _generation_request(self, request_id: str, request: Request) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            prompt=tuple(self._tokenizer.encode(request.prompt)),
            sampling=SamplingParams(
                temperature=request.temperature,
                top_p=request.nucleus_p,
                seed=request.rng_seed,
                max_tokens=request.max_len,
            ),
            stream=False,
        )


def sample_from_model(server: Server, prompt: str, max_len: int, temperature: float) -> str:
    """The text with which the model continues a prompt, as xAI's function of that name.

    >>> server = InferenceRunner(engine, tokenizer).run()
    >>> text = sample_from_model(server, "In the beginning", max_len=5, temperature=0.01)
    >>> isinstance(text, str)
    True

    Args:
      server: of `InferenceRunner.run`.
      prompt: at least one token long.
      max_len: tokens of the answer, at most.
      temperature: 0 takes the likeliest token always.

    Raises:
      EngineError: the request was refused or failed.
    """
    next(server)
    text = server.send(Request(prompt=prompt, temperature=temperature, max_len=max_len))
    assert isinstance(text, str)
    return text


async def stream_async(
    engine: Engine, request: GenerationRequest
) -> AsyncGenerator[TokenEvent, None]:
    """The events of one request, as they come; the last one has a finish reason.

    A caller that leaves the loop early and closes the iterator cancels the request.

    >>> async def tokens():
    ...     request = GenerationRequest(
    ...         request_id="example", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=3)
    ...     )
    ...     return [token async for e in stream_async(engine, request) for token in e.token_ids]
    >>> 1 <= len(asyncio.run(tokens())) <= 3
    True

    Raises:
      EngineError: the request was refused. One that fails later says so in its last event.
    """
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def sink(event: TokenEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    engine.submit(request, sink)
    ended = False
    try:
        while not ended:
            event = await events.get()
            ended = event.finish_reason is not None
            yield event
    finally:
        if not ended:
            engine.abort(request.request_id)
