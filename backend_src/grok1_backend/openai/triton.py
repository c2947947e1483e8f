"""The server behind the gateway, by tritonclient's asyncio gRPC: a stream for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from grok1_backend.openai.errors import ApiError, of_server
from grok1_backend.openai.translation import Call

MODEL = "grok1_generate"
# Without this header, errors on a stream come as text without a code.
_HEADERS = {"triton_grpc_error": "true"}
# With it, server 24.10 dies if a stream is cancelled while it ends with an error. So calls that are
# over, or refused like the others of their request, get this time to end before they are cancelled.
_ENDING_SECONDS = 0.2


@dataclass(frozen=True, eq=False)
class Reply:
    """A response of the server to a call: some more of the answer, or all of it."""

    _result: InferResult

    @property
    def text(self) -> str:
        """What it adds."""
        text: bytes = self._result.as_numpy("text_output").item()
        return text.decode()

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` in the last one."""
        reason: bytes = self._result.as_numpy("finish_reason").item()
        return reason.decode() or None

    @property
    def num_output_tokens(self) -> int:
        """Of the answer so far."""
        return int(self._result.as_numpy("num_output_tokens").item())

    def rows(self, name: str) -> list[Any]:
        """A tensor's values for each of the tokens; none where the response comes without it."""
        array: NDArray[np.generic] | None = self._result.as_numpy(name)
        return [] if array is None else array[0].tolist()


class Triton:
    """A connection. To be made, used and closed in one event loop."""

    def __init__(self, url: str) -> None:
        """Connects when it is first used.

        Args:
          url: `host:port` of the server's gRPC interface.
        """
        self._client = InferenceServerClient(url)
        self._closed = False
        self._endings: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every answer that is under way, with an error."""
        self._closed = True
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether the server answers, and has the model loaded."""
        try:
            return bool(await self._client.is_model_ready(MODEL, client_timeout=5))
        except InferenceServerException:
            return False

    async def generate(self, call: Call) -> AsyncGenerator[Reply, None]:
        """The replies to a call, the last one with a finish reason.

        When the iterator is closed or its task cancelled, the server is told to stop.

        Raises:
          ApiError: what the server answered instead, or that there is none.
        """

        async def request() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": MODEL, "inputs": call.inputs, "outputs": call.outputs}

        stream = self._client.stream_infer(request(), headers=_HEADERS)
        finished = False
        try:
            async for result, _ in stream:
                reply = Reply(result)
                finished = reply.finish_reason is not None
                yield reply
        except grpc.RpcError as error:
            raise of_server(error) from None
        except asyncio.CancelledError:
            if self._closed:
                raise ApiError(503, "the gateway is stopping") from None
            raise
        finally:
            stream.cancel()
        if not finished:
            raise ApiError(500, "the server ended the answer without a reason")

    async def generate_all(self, calls: Sequence[Call]) -> AsyncGenerator[tuple[Call, Reply], None]:
        """The replies to several calls as they come; the first error ends them all.

        Replies are taken from the server as fast as the caller takes them from here.

        Raises:
          ApiError: as `generate`.
        """
        replies: asyncio.Queue[tuple[Call, Reply] | Exception] = asyncio.Queue(len(calls))

        async def follow(call: Call) -> None:
            try:
                async with aclosing(self.generate(call)) as answer:
                    async for reply in answer:
                        await replies.put((call, reply))
            except Exception as error:
                await replies.put(error)

        tasks = [asyncio.create_task(follow(call)) for call in calls]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await replies.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            # In a task of its own: what awaits here may be cancelled again and again.
            ending = asyncio.create_task(_end(tasks))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks, timeout=_ENDING_SECONDS)
    for task in tasks:
        task.cancel()
