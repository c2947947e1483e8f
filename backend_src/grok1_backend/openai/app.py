"""The HTTP side of the gateway: routes, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from grok1_backend.engine.errors import EngineError
from grok1_backend.openai import requests
from grok1_backend.openai.errors import ApiError, of_engine, of_validation
from grok1_backend.openai.responses import CHAT, COMPLETION, Answer
from grok1_backend.openai.translation import Call, Render, chat_calls, completion_calls
from grok1_backend.openai.triton import Reply, Triton
from grok1_backend.text.tokenizer import Tokenizer

T = TypeVar("T")

_CLIENT_GONE = 499  # nobody reads it; the access log shows it


@dataclass(frozen=True)
class Gateway:
    """What all requests share."""

    triton: Triton
    tokenizer: Tokenizer
    model_name: str
    render: Render | None = None
    """Makes the prompts of chats; None: there are none."""


def create_app(gateway: Gateway) -> FastAPI:
    """The application that serves the API."""
    app = FastAPI(title="Grok-1", description=__doc__)
    _add_error_handlers(app)
    _add_tokenizer(app, gateway.tokenizer)
    model = {
        "id": gateway.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "grok1-backend",
    }

    @app.get("/health")
    async def health() -> Response:
        """200 when the server behind the gateway takes requests, else 503."""
        return Response(status_code=200 if await gateway.triton.is_ready() else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> dict[str, Any]:
        _check_model(gateway, name)
        return model

    @app.post("/v1/completions")
    async def completions(body: requests.CompletionRequest, request: Request) -> Response:
        _check_model(gateway, body.model)
        calls = completion_calls(body, gateway.tokenizer)
        answer = Answer(COMPLETION, gateway.model_name, calls, gateway.tokenizer)
        return await _respond(gateway.triton, answer, calls, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: requests.ChatRequest, request: Request) -> Response:
        _check_model(gateway, body.model)
        if gateway.render is None:
            raise ApiError(
                404,
                f"{gateway.model_name} is served without a chat template: ask /v1/completions, or "
                "start the gateway with --chat-template",
            )
        calls = chat_calls(body, gateway.tokenizer, gateway.render)
        answer = Answer(CHAT, gateway.model_name, calls, gateway.tokenizer)
        return await _respond(gateway.triton, answer, calls, body, request)

    return app


def _check_model(gateway: Gateway, name: str) -> None:
    if name != gateway.model_name:
        message = f"there is no model {name!r} here: {gateway.model_name!r} is served"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _respond(
    triton: Triton, answer: Answer, calls: Sequence[Call], body: requests.Request, request: Request
) -> Response:
    replies = triton.generate_all(calls)
    try:
        if not body.stream:
            return JSONResponse(answer.whole(await _unless_gone(request, _collect(replies))))
        # An error that comes before anything else has its HTTP status.
        first = await _unless_gone(request, anext(replies))
    except BaseException:
        await replies.aclose()
        raise
    return EventStream(
        _events(answer, first, replies, with_usage=body.reports_usage), replies.aclose
    )


async def _collect(replies: AsyncIterator[tuple[Call, Reply]]) -> list[Reply]:
    """The one reply to each call, in the calls' order."""
    found = {call.index: reply async for call, reply in replies}
    return [found[index] for index in range(len(found))]


async def _events(
    answer: Answer,
    first: tuple[Call, Reply],
    replies: AsyncIterator[tuple[Call, Reply]],
    *,
    with_usage: bool,
) -> AsyncIterator[str]:
    """The server-sent events of a stream; an error in the middle is the last of them."""
    try:
        unknown = {"usage": None} if with_usage else {}
        yield _event(answer.chunk(*first) | unknown)
        async for call, reply in replies:
            yield _event(answer.chunk(call, reply) | unknown)
        if with_usage:
            yield _event(answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body)


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events that ends what they are made of, also when the client goes away."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()


class ClientGone(Exception):
    """The client has closed its connection."""


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which ends when the client goes away.

    Raises:
      ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_error_handlers(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(EngineError)
    async def refused_here(_: Request, error: EngineError) -> Response:
        return answer(of_engine(error))

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        is_chat = request.url.path.endswith("/chat/completions")
        kind = requests.ChatRequest if is_chat else requests.CompletionRequest
        return answer(of_validation(error.errors(), list(kind.model_fields)))

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        return answer(ApiError(error.status_code, f"{where}: {error.detail}"))

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return answer(ApiError(500, f"the gateway has failed: {type(error).__name__}"))


def _add_tokenizer(app: FastAPI, tokenizer: Tokenizer) -> None:
    """The tokenizer, by the names of vLLM's server: lm-evaluation-harness asks there."""

    @app.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        # No text stands for these: in a prompt, their names are text like any other.
        return {"eos_token": None, "bos_token": None, "vocab_size": tokenizer.vocab_size}

    @app.post("/tokenize")
    async def tokenize(body: requests.TokenizeRequest) -> dict[str, Any]:
        ids = tokenizer.encode(body.prompt)
        return {"tokens": ids, "count": len(ids)}

    @app.post("/detokenize")
    async def detokenize(body: requests.DetokenizeRequest) -> dict[str, Any]:
        return {"prompt": tokenizer.decode(body.tokens).decode(errors="replace")}
