"""What can be known of the production image without Docker, and of the package that it installs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grok1_backend.server.wheel import find_wheel

ROOT = Path(__file__).resolve().parents[1]


def _instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, as (name, arguments), joined over their lines."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    split = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in split]


def _arguments(name: str) -> list[str]:
    return [arguments for found, arguments in _instructions() if found == name]


def test_the_image_is_pinned_to_a_release_that_can_cancel_streams() -> None:
    (image,) = (argument for argument in _arguments("ARG") if "IMAGE" in argument)
    release = re.fullmatch(r"TRITON_IMAGE=nvcr\.io/nvidia/tritonserver:(\d\d)\.(\d\d)-py3", image)
    assert release is not None
    assert (int(release[1]), int(release[2])) >= (24, 12)


def test_what_the_image_copies_is_in_the_repository_and_not_ignored() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = [path for line in _arguments("COPY") if "--from" not in line for path in line.split()]
    sources = [path for path in copied if path != "./" and not path.startswith("/")]
    assert sources
    for path in sources:
        assert (ROOT / path).exists(), path
        assert path in allowed, path


def test_the_image_installs_by_the_makefile(tmp_path: Path) -> None:
    (command,) = (line for line in _arguments("RUN") if "make install" in line)
    words = shlex.split(command[command.index("make") :])
    makefile = (ROOT / "Makefile").read_text()
    for name in (word.split("=")[0] for word in words if "=" in word):
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), name
    words = [word.replace("/opt/grok1", str(tmp_path)) for word in words]
    planned = subprocess.run(
        [*words, "--dry-run", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"-m venv {tmp_path}/venv" in planned
    assert "--require-hashes --requirement requirements/cuda.txt" in planned
    assert re.search(r"--no-deps --no-build-isolation \.$", planned, re.MULTILINE)


def test_the_image_starts_tritonserver_with_options_that_it_has() -> None:
    (command,) = _arguments("CMD")
    options = re.findall(r'"(--[a-z-]+)[="]', command)
    wheel = find_wheel()
    usage = subprocess.run([wheel.server, "--help"], capture_output=True, text=True, check=False)
    known = re.findall(r"^  (--[a-z-]+)", usage.stdout + usage.stderr, re.MULTILINE)
    assert options
    assert set(options) <= set(known)


def test_the_image_does_not_run_as_root_and_tells_its_health() -> None:
    assert _arguments("USER") == ["1000:1000"]  # the image's user triton-server
    (health,) = _arguments("HEALTHCHECK")
    assert json.loads(health.split("CMD", 1)[1])[:2] == ["grok1-backend", "health"]


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.stem
)
def test_a_lock_has_a_hash_for_each_package_and_names_no_host(lock: Path) -> None:
    text = lock.read_text()
    packages = re.findall(r"^[a-z][^\s=]*==", text, re.MULTILINE)
    assert packages
    assert len(
        re.findall(r"^[a-z].*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    ) == len(packages)
    assert "://" not in text
    assert "index" not in text


def test_the_package_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"  # setuptools writes beside what it builds
    shutil.copytree(ROOT / "backend_src", source / "backend_src")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    # Without a compiler: what it makes of the kernels' sources is tested elsewhere.
    without_compiler = {**os.environ, "CXX": "none"}
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True, env=without_compiler)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = ROOT / "backend_src" / "grok1_backend"
    for kind in ("py.typed", "*.py", "configs/*.toml", "kernels/source/*"):
        files = list(package.rglob(kind))
        assert files, kind
        assert {str(path.relative_to(package.parent)) for path in files} <= names
