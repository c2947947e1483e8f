"""The socket by which `grok1` sends a model the events of all its calls, a step's at one time.

Not as responses of the calls, which are a sequence of messages between three processes each, and
which the stub of server 24.10 takes badly: its iterator waits for Python's lock while it holds one
of its own, so that a response, a reader that wakes and a call that is just made stop each other for
ever. It happens only if a call gets a second response while its reader still wakes for the first:
here a call gets one to say that it is taken in, and one that ends it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import NamedTuple

from grok1_backend.engine.errors import invalid
from grok1_backend.triton.relay import Part, pack, unpack

logger = logging.getLogger(__name__)


class Address(NamedTuple):
    """Where a model listens, and the secret that a sender must know."""

    name: str
    key: str

    @classmethod
    def new(cls) -> Address:
        """One that nobody else has."""
        return cls(uuid.uuid4().hex, uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address from its text.

        Raises:
          EngineError: INVALID_ARG if it is none.
        """
        name, _, key = text.partition(".")
        if not (name.isalnum() and key.isalnum() and name.isascii() and key.isascii()):
            raise invalid("internal", text, "the address of a model of this server")
        return cls(name, key)

    def __str__(self) -> str:
        return f"{self.name}.{self.key}"

    @property
    def path(self) -> str:
        """Of the socket, which is in no folder and goes with its process."""
        return f"\0grok1-{self.name}"


class Inbox:
    """The end of the model that calls."""

    def __init__(self, receive: Callable[[Sequence[Part]], None]) -> None:
        """Listens.

        Args:
          receive: gets what comes, on a thread of the sender's.
        """
        self.address = Address.new()
        self._receive = receive
        self._listener = Listener(self.address.path, "AF_UNIX", authkey=self.address.key.encode())
        threading.Thread(target=self._accept, name="inbox", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            except Exception:
                logger.exception("a sender was refused")
                continue
            threading.Thread(
                target=self._read, args=(connection,), name="inbox", daemon=True
            ).start()

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                packed = connection.recv_bytes()
            except (EOFError, OSError):
                return  # grok1 has ended, or is unloaded
            self._receive(unpack(packed))


class Outbox:
    """The end of `grok1`: connections to the models that call it. One thread may use it."""

    def __init__(self) -> None:
        self._connections: dict[Address, Connection] = {}

    def send(self, address: Address, parts: Sequence[Part]) -> None:
        """Sends the parts.

        Raises:
          Exception: nobody listens there, or not any more.
        """
        connection = self._connections.get(address)
        if connection is None:
            connection = Client(address.path, "AF_UNIX", authkey=address.key.encode())
            self._connections[address] = connection
        try:
            connection.send_bytes(pack(parts))
        except Exception:
            del self._connections[address]
            connection.close()
            raise

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
