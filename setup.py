"""Builds the native kernels into the package where that is possible; pyproject.toml has the rest.

Without a compiler, or without jaxlib (pip's isolated build has none: `--no-build-isolation`), the
package installs all the same, and builds them into the user's cache when they are first needed.
An editable install always does that, since there the sources may change.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

KERNELS = "grok1_backend/kernels"


class BuildWithKernels(build_py):
    """Copies the package, then compiles the kernels beside the module that loads them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        source = Path(__file__).parent / "backend_src" / KERNELS / "build.py"
        spec = importlib.util.spec_from_file_location("build_kernels", source)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build(Path(self.build_lib) / KERNELS / build.library_name())
        except build.BuildError as error:
            logging.warning("native kernels: not built at install: %s", error)


class WithBinary(Distribution):
    """The wheel holds machine code, so it is one of this platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=WithBinary)
