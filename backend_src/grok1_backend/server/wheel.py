"""Finds the tritonserver inside the installed nvidia-pytriton wheel and makes it runnable.

Only the wheel's files are used, never its Python package. What the wheel lacks is arranged here: a
backend directory with the stub of the running Python, and the search paths of the libraries.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from grok1_backend.server.options import LaunchError

BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonWheel:
    """The parts of an installed nvidia-pytriton wheel."""

    root: Path  # holds bin/, backends/, caches/, python_backend_stubs/
    libraries: Path  # the shared libraries that came with the wheel

    @property
    def server(self) -> Path:
        """The tritonserver executable."""
        return self.root / "bin" / "tritonserver"

    def make_backend_directory(self, where: Path) -> None:
        """Makes what `--backend-directory` needs: the Python backend beside this Python's stub.

        The wheel keeps one stub for each Python version away from the backend, which looks for a
        stub in its own folder only.
        """
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.root / "python_backend_stubs" / minor / STUB
        if not stub.exists():
            raise LaunchError(f"nvidia-pytriton has no Python backend for Python {minor}")
        python = where / "python"
        python.mkdir(parents=True)
        (python / STUB).symlink_to(stub)
        for name in BACKEND_FILES:
            (python / name).symlink_to(self.root / "backends" / "python" / name)

    def library_path(self) -> str:
        """LD_LIBRARY_PATH: the wheel's libraries, this Python's, and what was there before."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        parts = [
            str(self.libraries),
            *_python_library_folders(),
            *([inherited] if inherited else []),
        ]
        return os.pathsep.join(parts)


def find_wheel() -> TritonWheel:
    """The wheel installed in the running environment.

    Raises:
      LaunchError: it is not installed, or the NumPy beside it is one its stub cannot work with.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise LaunchError(
            "nvidia-pytriton, which carries the local tritonserver, is not installed: "
            "install requirements/serve.txt, or run `make serve`"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        # The stub of this version reads the strides of a NumPy 2 array as 0.
        raise LaunchError(f"NumPy {numpy} breaks the local tritonserver: install numpy<2")
    package = Path(spec.origin).parent
    return TritonWheel(package / "tritonserver", package.parent / "nvidia_pytriton.libs")


def _python_library_folders() -> list[str]:
    """Folders that hold libpythonX.Y.so, which the stub links to; empty: the system knows it.

    Raises:
      LaunchError: this Python has no shared library.
    """
    stem = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "")
    if (folder / f"lib{stem}.so.1.0").exists():
        return [str(folder)]
    if ctypes.util.find_library(stem):
        return []
    raise LaunchError(
        f"this Python has no lib{stem}.so.1.0, which the tritonserver's Python backend needs: "
        f"use a Python built with --enable-shared, or install the system's lib{stem} package"
    )
