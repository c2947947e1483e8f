"""Options for XLA on GPUs: known to the jaxlib they are pinned for, and never in a user's way."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

from grok1_backend.engine.compiler_options import PINNED, compiler_options
from grok1_backend.kernels import choice

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "on_gpu", lambda: True)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_there_are_none_on_cpu() -> None:
    assert compiler_options() is None


@pytest.mark.usefixtures("on_gpu")
def test_what_the_user_set_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    version, pinned = next(iter(PINNED.items()))
    monkeypatch.setattr(jaxlib.version, "__version__", version)
    assert compiler_options() == pinned
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_dump_to=/tmp")
    left = {name: value for name, value in pinned.items() if "command_buffer" not in name}
    assert compiler_options() == left


@pytest.mark.usefixtures("on_gpu")
def test_an_unknown_version_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxlib.version, "__version__", "99.0")
    assert compiler_options() is None


def test_this_jaxlib_knows_its_options() -> None:
    """All platforms of a jaxlib have the same options: an unknown name or value is an error."""
    version = jaxlib.version.__version__
    if version not in PINNED:
        pytest.skip(f"nothing is pinned for jaxlib {version}")
    function = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    function.compile(compiler_options=PINNED[version])
    with pytest.raises(Exception, match="xla_gpu_no_such_option"):
        function.compile(compiler_options={"xla_gpu_no_such_option": True})


def test_the_image_s_jaxlib_is_pinned() -> None:
    """A new lock wants its options looked at again."""
    lock = (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    versions = re.findall(r"^jaxlib==(\S+)", lock, re.MULTILINE)
    assert versions
    assert set(versions) <= set(PINNED)


def test_the_documentation_lists_every_option() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\d.]+) \| `(xla_\w+)` \| `(.+)` \|$", text, re.MULTILINE)
    expected = [
        (version, name, str(value))
        for version, options in PINNED.items()
        for name, value in options.items()
    ]
    assert listed == expected
