"""The launcher with a model that echoes: what it says, how it exits, that it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grok1_backend.server import LaunchError, ServerOptions
from grok1_backend.server.log import LogFollower, failure, progress
from grok1_backend.server.options import free_ports

HERE = Path(__file__).resolve().parent
ECHO = HERE / "echo_repository"
SECONDS = 60


class Launcher:
    """A `grok1-backend serve` of its own ports, and what belongs to it on this machine."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        model = folder / "model"  # must be there, and is not read by the echo
        model.mkdir(exist_ok=True)
        (model / "config.toml").touch()
        self.ports = free_ports(3)
        http, grpc, metrics = (str(port) for port in self.ports)
        ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
        defaults = ["--model", str(model), "--cache-dir", str(folder / "cache")]
        defaults += ["--model-repository", str(ECHO)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grok1_backend.cli", "serve", *defaults, *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.prefix = f"grok1_{self.process.pid}_"

    def read_until(self, text: str) -> str:
        """The output up to the line that has `text` in it."""
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if text in line:
                return read
        pytest.fail(f"{text!r} was never printed:\n{read}{self.errors()}")

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def exit_code(self) -> int:
        return self.process.wait(SECONDS)

    def processes(self) -> list[int]:
        """The server and its models: the shared memory's name is on each one's command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes()
            except OSError:  # ended meanwhile
                continue
            if self.prefix.encode() in line:
                found.append(int(path.parent.name))
        return found

    def server(self) -> int:
        """The process id of the tritonserver; the models' processes are its children."""
        (pid,) = [pid for pid in self.processes() if _parent(pid) == self.process.pid]
        return pid

    def leftovers(self) -> list[object]:
        return [*self.processes(), *Path("/dev/shm").glob(f"{self.prefix}*")]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(SECONDS * 10):
        if happened():
            return
        time.sleep(0.1)
    pytest.fail("waited in vain")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    launched: list[Launcher] = []

    def start(*arguments: str, **environment: str) -> Launcher:
        launched.append(Launcher(tmp_path, *arguments, **environment))
        return launched[-1]

    yield start
    for launcher in launched:
        if launcher.process.poll() is None:
            launcher.process.terminate()
            launcher.exit_code()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_leaves_nothing(
    launch: Callable[..., Launcher], tmp_path: Path, stop: signal.Signals
) -> None:
    launcher = launch("--slots", "3")
    printed = launcher.read_until("Serving")
    # The engine's progress is shown, and the choice of the model reached it.
    assert f"compiled 1/1 echo of {tmp_path / 'model'} with 3 slots" in printed
    assert "In the beginning In the beginning" in printed  # the prompt and its streamed echo
    assert f"curl -N http://127.0.0.1:{launcher.ports[0]}/v2/models/grok1_generate" in printed
    assert len(launcher.processes()) == 2
    assert launcher.leftovers() != launcher.processes()  # shared memory is in use
    launcher.process.send_signal(stop)
    assert launcher.exit_code() == 0
    assert launcher.leftovers() == []


def test_a_stream_that_does_not_end_does_not_hold_up_the_stop(
    launch: Callable[..., Launcher],
) -> None:
    launcher = launch("--exit-timeout", "1")
    launcher.read_until("Serving")
    url = f"http://127.0.0.1:{launcher.ports[0]}/v2/models/grok1_generate/generate_stream"
    body = b'{"text_input": "never (pause) more"}'
    with urllib.request.urlopen(url, body, timeout=SECONDS) as stream:
        assert b" never" in stream.readline()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.exit_code() == 0
    assert launcher.leftovers() == []


def test_the_printed_commands_work(launch: Callable[..., Launcher]) -> None:
    printed = launch().read_until("Serving")
    curl = next(line for line in printed.splitlines() if line.startswith("  curl"))
    python = printed[printed.index(f"{sys.executable} - <<") : printed.index("\nServing")]
    streamed = _shell(curl)
    assert streamed.lstrip().startswith("data: {")
    assert '"text_output":" beginning"' in streamed
    assert _shell(python) == " In the beginning"


def _shell(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return done.stdout


def test_a_model_that_fails_is_named_with_its_reason(launch: Callable[..., Launcher]) -> None:
    launcher = launch(ECHO_FAILS="the checkpoint\nis not there")
    assert launcher.exit_code() == 1
    errors = launcher.errors()
    reason = "the model grok1_generate did not load: ValueError: the checkpoint is not there"
    assert errors.startswith(f"grok1-backend: {reason}")
    assert errors.count("\n") == 1
    assert launcher.leftovers() == []


def test_a_taken_port_is_named(launch: Callable[..., Launcher]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch("--grpc-port", str(port))
        assert launcher.exit_code() == 1
        assert f"the gRPC port {port} on 127.0.0.1 is in use" in launcher.errors()


def test_a_missing_model_is_named(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--model", "no/such/model")
    assert launcher.exit_code() == 1
    assert "there is no model directory at no/such/model" in launcher.errors()


def test_a_folder_that_is_no_model_is_named(launch: Callable[..., Launcher]) -> None:
    launcher = launch("--model", str(HERE))
    assert launcher.exit_code() == 1
    assert f"{HERE} is no model directory: it has no config.toml" in launcher.errors()


def test_a_missing_repository_is_named(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = launch("--model-repository", str(tmp_path / "none"))
    assert launcher.exit_code() == 1
    assert f"there is no model repository at {tmp_path / 'none'}" in launcher.errors()


def test_a_server_that_dies_is_reported_and_cleaned_up(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.read_until("Serving")
    os.kill(launcher.server(), signal.SIGKILL)
    assert launcher.exit_code() == 1
    assert "the server ended by itself with signal SIGKILL" in launcher.errors()
    assert launcher.leftovers() == []


def test_a_killed_launcher_takes_the_server_with_it(launch: Callable[..., Launcher]) -> None:
    launcher = launch()
    launcher.read_until("Serving")
    launcher.process.kill()
    launcher.exit_code()
    _wait_until(lambda: launcher.leftovers() == [])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"http_port": 0}, "the HTTP port is 0"),
        ({"grpc_port": 8002}, "the ports must differ"),
        ({"slots": 0}, "slots is 0"),
        ({"exit_timeout": -1}, "the exit timeout is -1 s"),
        ({"log_level": "loud"}, "the log level is 'loud': one of error, warning, info, verbose"),
        ({"model_control": "poll"}, "the model control mode is 'poll'"),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        ServerOptions(model_repositories=(ECHO,), **wrong)  # type: ignore[arg-type]


def test_the_log_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    follower = LogFollower(path)
    with path.open("a") as log:
        log.write("one\ntw")
        log.flush()
        assert list(follower.lines()) == ["one"]
        log.write("o\n")
        log.flush()
        assert list(follower.lines()) == ["two"]
    assert list(follower.lines()) == []
    follower.close()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('I1129 20:43:36.162346 77 model_lifecycle.cc:472] "loading: grok1:1"', "loading grok1"),
        (
            "I1129 20:43:37.5 77 model_lifecycle.cc:839] \"successfully loaded 'grok1'\"",
            "loaded grok1",
        ),
        (
            'I1129 20:43:37.5 77 model.py:6] "grok1: compiled 7/19 decode slots=4"',
            "compiled 7/19 decode slots=4",
        ),
        ('I1129 20:43:37.5 77 server.cc:604] "something else"', None),
        ("Error: Failed to initialize NVML", None),
    ],
)
def test_progress_is_read_from_the_log(line: str, shown: str | None) -> None:
    assert progress(line) == shown


def test_reasons_are_read_from_the_log() -> None:
    raised = (
        "E1129 20:44:00.010986 79 model_lifecycle.cc:642] \"failed to load 'grok1' version 1: "
        r'Internal: ValueError: say \"x\",\nnot y\n\nAt:\n  /a/model.py(8): initialize\n"'
    )
    assert failure(raised) == 'the model grok1 did not load: ValueError: say "x", not y'
    unreadable = (
        "E1129 20:44:10.315659 82 model_repository_manager.cc:1460] "
        "\"Poll failed for model directory 'm': failed to read text proto\""
    )
    assert failure(unreadable) == "the model m did not load: failed to read text proto"
    assert (
        failure("I1129 20:44:00.011003 79 model_lifecycle.cc:777] \"failed to load 'm'\"") is None
    )
