"""The native kernels and the same computation in JAX: what tests choose between."""

from __future__ import annotations

from typing import Any

import pytest

from grok1_backend.kernels import native


@pytest.fixture
def jax_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the native kernels out of what is traced from here on."""
    monkeypatch.setattr(native, "available", lambda _: False)


@pytest.fixture(scope="module", params=["native", "jax"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Both, one after the other; what a module-scoped fixture compiles, it compiles for each."""
    if request.param == "native" and not native.available("float32"):
        pytest.skip("the native kernels cannot be built here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "jax":
            patch.setattr(native, "available", lambda _: False)
        yield request.param
