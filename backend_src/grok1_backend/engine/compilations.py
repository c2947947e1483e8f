"""Counts what JAX compiles in this process: once an engine is ready, that is to be nothing."""

from __future__ import annotations

import threading

import jax

# Told of each program that is not in the memory of the process: compiled, or read from the cache.
_EVENT = "/jax/core/compile/backend_compile_duration"

_lock = threading.Lock()
_count = 0


def compilations() -> int:
    """Programs that were compiled, or read from the cache of compiled ones, so far."""
    return _count


def _heard(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001
    global _count
    if event == _EVENT:
        with _lock:
            _count += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
