"""Drives engines in processes of their own (`peers/worker.py`), of which one runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class WorkerError(Exception):
    """An engine does not start, does not answer, or says that it failed."""


class Worker:
    """A loaded engine. Between its turns it is stopped, lest its threads spin for work."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        """Starts the process and waits until the engine is loaded.

        Args:
          log: where its standard error goes.
          environment: variables beside ours.
          timeout: seconds that loading, and later each command, may take.

        Raises:
          WorkerError: it ended, or was not ready in time.
        """
        self.name = name
        self._log = log
        self._timeout = timeout
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                process_group=0,  # a group of its own, to be stopped as a whole
            )
        try:
            self.versions: dict[str, str] = self._answer()["ready"]
        except BaseException:
            self.close()
            raise
        self._pause()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Has the engine run one command while nothing else does.

        Args:
          timeout: seconds that it may take; None: as loading.

        Raises:
          WorkerError: it failed, ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer(timeout)
        except BrokenPipeError:
            raise self._failed("has ended") from None
        self._pause()
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """Ends the process, and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, timeout: float | None = None) -> dict[str, Any]:
        """The next line of the process."""
        assert self._process.stdout is not None
        seconds = self._timeout if timeout is None else timeout
        end = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(end - time.monotonic()):
                    raise self._failed(f"did not answer in {seconds:g} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._failed("has ended")
                line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> WorkerError:
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return WorkerError(f"{self.name} {what}: {''.join(last)}")

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
