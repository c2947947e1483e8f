"""Owns one tritonserver process: its start, its readiness, its end, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from grok1_backend.server import child
from grok1_backend.server.log import LogFollower, failure, progress
from grok1_backend.server.options import LaunchError, ServerOptions
from grok1_backend.server.wheel import find_wheel

_POLL_SECONDS = 0.1
# What the end of a server may take before it is killed: unloading comes on top of the exit timeout;
# while it still loads, tritonserver looks at no signal and has no request to wait for.
_UNLOAD_SECONDS = 5
_LOADING_SECONDS = 1
_SHARED_MEMORY = Path("/dev/shm")
# For the calls and responses of each Python model. Triton takes one a core; on two cores two calls
# that wait for each other's models are all of them, and nothing moves any more. Of many, the one
# that has slept longest takes the next response, with cold caches: 32 cost half as much again.
_CALL_THREADS = 4
_LOG_ARGUMENTS = {
    "error": ["--log-info=false", "--log-warning=false"],
    "warning": ["--log-info=false"],
    "info": [],
    "verbose": ["--log-verbose=1"],
}


class TritonServer:
    """A running tritonserver; a context manager that is ready inside the `with` block.

    The server lives in a process group of its own: a Ctrl-C at the terminal reaches the launcher
    alone, which then stops the server in order. Enter it from a thread that outlives the server:
    the kernel stops the server when the thread that started it ends.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        report: Callable[[str], None] = lambda _: None,
        start_timeout: float | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
          options: what to run.
          report: gets a line about each thing that happens while the server starts.
          start_timeout: seconds until the server must be ready; None: as long as it takes.
        """
        self.options = options
        # Names the shared memory of this server's models: two servers never share it, and what a
        # killed server left can be told from what others use.
        self.shared_memory_prefix = f"grok1_{os.getpid()}_{uuid.uuid4().hex[:8]}_"
        self._report = report
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._log: LogFollower | None = None
        self._failure: str | None = None
        self._ready = False

    def __enter__(self) -> TritonServer:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the tritonserver, which is also that of its process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def wait(self) -> None:
        """Returns only by an exception: the server is not meant to end by itself.

        Raises:
          LaunchError: the server ended; the message says how.
        """
        assert self._process is not None, "the server was not started"
        code = self._process.wait()
        raise LaunchError(
            f"the server ended by itself with {_ending(code)}; see {self.options.log}"
        )

    def stop(self) -> None:
        """Stops the server and removes what it leaves; running requests get the exit timeout.

        What still runs then ends with an error that says so, if the engine is alive.
        A KeyboardInterrupt meanwhile (a second Ctrl-C) ends it at once. May be called again.
        """
        try:
            if self._process is not None:
                self._end(self._process)
        finally:
            self._process = None
            self._remove_leftovers()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            seconds = self._drain() + _UNLOAD_SECONDS if self._ready else _LOADING_SECONDS
            process.terminate()
            process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            # The server itself, where it hangs, and models that it left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _remove_leftovers(self) -> None:
        for region in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _drain(self) -> float:
        """Ends what runs; returns what is left of the exit timeout, in seconds."""
        from grok1_backend.server.drain import drain  # with all of tritonclient, for this alone

        assert self._process is not None
        end = time.monotonic() + self.options.exit_timeout
        if self._process.poll() is None:
            drain(self.options.grpc_url, self.options.exit_timeout)
        return max(0.0, end - time.monotonic())

    def _start(self) -> None:
        self.options.check()
        wheel = find_wheel()
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="grok1-server-"))
        backends = self._directory / "backends"
        wheel.make_backend_directory(backends)
        command = [
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *(str(wheel.server), *self._arguments(backends)),
        ]
        environment = self._environment(wheel.library_path())
        with self.options.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._log = LogFollower(self.options.log)

    def _arguments(self, backends: Path) -> list[str]:
        options = self.options
        load = ["--load-model=*"] if options.model_control == "explicit" else []
        return [
            *(f"--model-repository={path.absolute()}" for path in options.model_repositories),
            f"--model-control-mode={options.model_control}",
            *load,
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shared_memory_prefix}",
            f"--backend-config=python,thread-pool-size={_CALL_THREADS}",
            f"--exit-timeout-secs={options.exit_timeout}",
            f"--http-address={options.address}",
            f"--http-port={options.http_port}",
            f"--grpc-address={options.address}",
            f"--grpc-port={options.grpc_port}",
            f"--metrics-address={options.address}",
            f"--metrics-port={options.metrics_port}",
            "--allow-metrics=true",
            *_LOG_ARGUMENTS[options.log_level],
        ]

    def _environment(self, library_path: str) -> dict[str, str]:
        options = self.options
        environment = dict(os.environ)
        environment |= {
            "LD_LIBRARY_PATH": library_path,
            # The stub embeds Python, isolated: it heeds no variable of Python's, and finds the
            # virtual environment, which must have this package, by the first python3 here.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "GROK1_MODEL": str(options.model.absolute()),
        }
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.cache / "jax"))
        if options.slots is not None:
            environment["GROK1_SLOTS"] = str(options.slots)
        return environment

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._log is not None
        deadline = None if self._start_timeout is None else time.monotonic() + self._start_timeout
        while not self._is_ready():
            code = self._process.poll()
            self._read_log()
            if self._failure is not None:
                # Triton goes on with the other models first, which may take minutes.
                raise LaunchError(f"{self._failure} (log: {self.options.log})")
            if code is not None:
                raise LaunchError(
                    f"the server ended with {_ending(code)} before it was ready; "
                    f"see {self.options.log}"
                )
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(
                    f"the server was not ready after {self._start_timeout:.0f} s; "
                    f"see {self.options.log}"
                )
            time.sleep(_POLL_SECONDS)
        self._ready = True
        self._read_log()

    def _is_ready(self) -> bool:
        ready = f"{self.options.http_url}/v2/health/ready"
        try:
            # The port of the metrics is opened last, after the server says that it is ready.
            for url in (ready, self.options.metrics_url):
                urllib.request.urlopen(url, timeout=5).close()
            return True
        except (urllib.error.URLError, OSError):
            return False

    def _read_log(self) -> None:
        assert self._log is not None
        for line in self._log.lines():
            if shown := progress(line):
                self._report(shown)
            # The first is the cause: models that need the failed one fail after it.
            self._failure = self._failure or failure(line)


def _ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
