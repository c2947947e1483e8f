"""What an operator sets about the engine's host side; the device side is `runner_settings`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The `[engine]` table. Times are in seconds."""

    max_queue: int = 1024
    """Requests that wait, turns behind an unfinished turn of their session included."""
    prefill_token_budget: int = 512
    """Padded prompt tokens that one step computes; so long can a prompt hold up the streams."""
    max_sessions: int = 4096
    session_lifetime: float = 3600.0
    """Without a turn for so long, a session is closed."""
    page_idle_time: float = 300.0
    """Unused for so long, KV kept for reuse is given up; a session's is computed again then."""
    max_generation_time: float = 600.0
    """How long a request may run, from its admission on."""
    default_max_tokens: int = 128
    """For callers whose client names no max_tokens."""
    max_tokens_limit: int = 2**31 - 1
    """The largest max_tokens of a request; the context bounds it besides."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "prefill_token_budget", "max_sessions", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        for name in ("session_lifetime", "page_idle_time", "max_generation_time"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}: a finite number above 0")
        if self.max_tokens_limit < self.default_max_tokens:
            raise ValueError(
                f"max_tokens_limit is {self.max_tokens_limit}: "
                f"at least default_max_tokens ({self.default_max_tokens})"
            )
        if self.session_lifetime < self.max_generation_time:
            raise ValueError(
                f"session_lifetime is {self.session_lifetime:g}: "
                f"at least max_generation_time ({self.max_generation_time:g})"
            )
