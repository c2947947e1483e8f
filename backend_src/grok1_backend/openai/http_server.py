"""The process: the application behind uvicorn, from its start to its last answer."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import uvicorn

from grok1_backend.openai.app import Gateway, create_app
from grok1_backend.openai.translation import Render
from grok1_backend.openai.triton import Triton
from grok1_backend.text.tokenizer import Tokenizer

# For clients that do not read what they are sent; then their connections are cut.
_LAST_SECONDS = 2


@dataclass(frozen=True)
class GatewayOptions:
    """What a gateway is started with."""

    url: str
    """`host:port` of the server's gRPC interface."""
    tokenizer: Tokenizer
    model_name: str
    render: Render | None
    """Makes the prompts of chats; None: there are none."""
    address: str
    port: int
    exit_timeout: int
    """Seconds that running requests get when the gateway is stopped."""


async def serve(options: GatewayOptions) -> None:
    """Serves until a signal ends it; then no connection is taken, and requests get their time."""
    async with Triton(options.url) as triton:
        gateway = Gateway(triton, options.tokenizer, options.model_name, options.render)
        config = uvicorn.Config(
            create_app(gateway),
            host=options.address,
            port=options.port,
            log_level="warning",
            timeout_graceful_shutdown=options.exit_timeout + _LAST_SECONDS,
        )
        await _Server(config, triton, options.exit_timeout).serve()


class _Server(uvicorn.Server):
    """Ends the answers that take too long at a stop: their streams end with an error."""

    def __init__(self, config: uvicorn.Config, triton: Triton, exit_timeout: int) -> None:
        super().__init__(config)
        self._triton = triton
        self._exit_timeout = exit_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._exit_timeout)
        await self._triton.close()
