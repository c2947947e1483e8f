"""Builds the native library: at install where that is possible, else when it is first needed.

XLA's headers lie in jaxlib and their interface changes with it, so a library fits one jaxlib: its
name holds a digest of the headers and of our sources. It runs on any CPU of the architecture: the
arithmetic is compiled for several instruction sets and chosen when it is loaded. Only the standard
library is imported here, since `setup.py` runs this file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread")
AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mfma", "-mprefer-vector-width=512")
VNNI = (*AVX512, "-mavx512bw", "-mavx512vnni")
AMX = (*VNNI, "-mamx-tile", "-mamx-int8")
INSTRUCTION_SETS = {
    "ComputeBase": ("compute.cc", ()),
    "ComputeAvx2": ("compute.cc", AVX2),
    "ComputeAvx512": ("compute.cc", AVX512),
    "IntegerAvxVnni": ("integer.cc", (*AVX2, "-mavxvnni")),
    "IntegerVnni": ("integer.cc", VNNI),
    "IntegerAmx": ("integer.cc", AMX),
    "FloatTableBase": ("float_table.cc", ()),
    "FloatTableAvx2": ("float_table.cc", AVX2),
    "FloatTableAvx512": ("float_table.cc", AVX512),
    "IntegerTableVnni": ("integer_table.cc", VNNI),
    "IntegerTableAmx": ("integer_table.cc", AMX),
}
"""The function that returns what is compiled for some instructions: from which source, flags."""


class BuildError(Exception):
    """There is no library and none can be built; says why in one line."""


def include_dir() -> Path:
    """Where jaxlib has XLA's headers.

    Raises:
      BuildError: there is no jaxlib (as in pip's isolated builds), or it has no headers.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise BuildError("jaxlib is not installed")
    directory = Path(spec.origin).with_name("include")
    if not (directory / "xla/ffi/api/ffi.h").is_file():
        raise BuildError("jaxlib has no headers of XLA's foreign function interface")
    return directory


def library_name() -> str:
    """The file name of the library that fits this jaxlib and these sources."""
    digest = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS)).encode())
    for file in sorted([*SOURCE.iterdir(), *(include_dir() / "xla/ffi/api").iterdir()]):
        digest.update(file.read_bytes())
    return f"kernels-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def find_or_build() -> Path:
    """The library as installed or as kept in the user's cache; built into the cache if missing.

    Of several processes that miss it at one time, one builds it and the others wait.

    Raises:
      BuildError: as `build`.
    """
    name = library_name()
    cached = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    cached = cached / "grok1-backend" / name
    for path in (Path(__file__).with_name(name), cached):
        if path.is_file():
            return path
    with _alone(cached):
        if not cached.is_file():
            build(cached)
    return cached


@contextlib.contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Waits for another process that builds the library, or for its end: its lock goes with it.

    Where nothing can be locked, nobody waits.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            library.parent.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(library.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(library: Path) -> None:
    """Compiles the library; `library` appears whole or not at all.

    Raises:
      BuildError: no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, or $CXX)")
    on_x86 = platform.machine() == "x86_64"
    jobs = [
        (source, name, flags)
        for name, (source, flags) in INSTRUCTION_SETS.items()
        if on_x86 or name.endswith("Base")
    ]
    plain = ("blocks.cc", "choice.cc", "experts.cc", "handlers.cc", "products.cc", "table.cc")
    jobs += [(source, "", ()) for source in plain]
    include = include_dir()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Beside the library, so that it is moved there in one step.
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:

            def compile_one(job: tuple[str, str, tuple[str, ...]]) -> str:
                source, name, flags = job
                target = f"{directory}/{Path(source).stem}{name}.o"
                define = [f"-DGROK1_COMPUTE={name}"] if name else []
                options = [*FLAGS, *flags, *define, "-isystem", str(include)]
                _run([compiler, *options, "-c", str(SOURCE / source), "-o", target])
                return target

            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, jobs))
            linked = f"{directory}/linked.so"
            _run([compiler, "-shared", "-pthread", *objects, "-o", linked])
            os.replace(linked, library)
    except OSError as error:
        raise BuildError(f"{library.parent} cannot be written: {error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise BuildError(f"the C++ compiler failed: {(errors or ['no message'])[0]}")
