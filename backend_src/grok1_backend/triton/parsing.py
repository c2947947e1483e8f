"""A request to `grok1`, as plain values, turned into the engine's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from grok1_backend.engine.errors import invalid
from grok1_backend.engine.requests import (
    TOP_TOKENS,
    GenerationRequest,
    SamplingParams,
    SessionTurn,
)
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.text.words import bad_word_runs, word_biases
from grok1_backend.triton.interface import EXCLUDE_INPUT, INPUT_IDS, PROMPT_TEXT, Tensors
from grok1_backend.triton.settings import Settings, gather
from grok1_backend.triton.values import from_tensor, to_int


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """One prompt with all that came with it; owns its arrays."""

    tensors: Tensors
    parameters: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    """Of the client's choosing; empty: none."""
    correlation_id: int | str = 0
    """Of the sequence; 0 or empty: none."""
    start: bool = False
    end: bool = False
    timeout: int = 0
    """Microseconds; 0: none."""

    @property
    def continues(self) -> bool:
        """Whether the prompt follows earlier turns of its sequence."""
        return bool(self.correlation_id) and not self.start


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the engine gets, and what of its events the client wants to see."""

    request: GenerationRequest
    return_log_probs: bool = False
    return_top_tokens: int = 0
    prompt_text: str = ""
    """Goes before the text of the first response."""


@dataclass(frozen=True, kw_only=True)
class RequestParser:
    """Makes generations of client requests.

    Attributes:
      end_ids: the model's, to which `stop_token_ids` adds.
      default_max_tokens: for requests that name none.
      tokenizer: for the settings that are words; None: they are refused.
      clock: what deadlines are counted by, as the engine does.
    """

    end_ids: Sequence[int]
    default_max_tokens: int
    tokenizer: Tokenizer | None = None
    clock: Callable[[], float] = time.monotonic

    def parse(self, client: ClientRequest) -> Generation:
        """Checks all that can be judged without the engine.

        Raises:
          EngineError: INVALID_ARG; the message names field, value and limit.
        """
        settings = gather(client.tensors, client.parameters)
        top_tokens = settings.pop("return_top_tokens", 0)
        if not 0 <= top_tokens <= TOP_TOKENS:
            raise invalid("return_top_tokens", top_tokens, f"0 to {TOP_TOKENS}")
        excludes = settings.pop(EXCLUDE_INPUT.name, True)
        return Generation(
            prompt_text="" if excludes else _prompt_text(client.tensors),
            return_log_probs=settings.pop("return_log_probs", False),
            return_top_tokens=top_tokens,
            request=GenerationRequest(
                request_id=client.request_id or uuid.uuid4().hex,
                prompt=_prompt(client.tensors),
                priority=settings.pop("priority", 0),
                stream=settings.pop("stream", True),
                return_prompt_log_probs=settings.pop("return_prompt_log_probs", False),
                deadline=self._deadline(client),
                session=_session(client),
                sampling=self._sampling(settings),
            ),
        )

    def _sampling(self, settings: Settings) -> SamplingParams:
        values = {name: settings[name] for name in _SAMPLING if name in settings}
        values.setdefault("max_tokens", self.default_max_tokens)
        values["stop_words"] = tuple(word.encode() for word in settings.get("stop_words", ()))
        if bad_words := settings.get("bad_words"):
            values["bad_words"] = bad_word_runs(self._words("bad_words", bad_words), bad_words)
        if "end_id" in settings or "stop_token_ids" in settings:
            ends = (settings["end_id"],) if "end_id" in settings else self.end_ids
            values["end_ids"] = (*ends, *settings.get("stop_token_ids", ()))
        values["logit_bias"] = self._biases(settings)
        return SamplingParams(**values)

    def _biases(self, settings: Settings) -> tuple[tuple[int, float], ...]:
        biases = dict(settings.get("logit_bias", ()))
        words = settings.get("embedding_bias_words", ())
        weights = settings.get("embedding_bias_weights", ())
        if words or weights:
            tokenizer = self._words("embedding_bias_words", words)
            for token_id, weight in word_biases(tokenizer, words, weights):
                biases[token_id] = biases.get(token_id, 0.0) + weight
        return tuple(biases.items())

    def _words(self, name: str, words: Sequence[str]) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid(name, words, "none where the model has no tokenizer")
        return self.tokenizer

    def _deadline(self, client: ClientRequest) -> float | None:
        timeout = client.timeout or to_int("timeout", client.parameters.get("timeout", 0))
        if timeout < 0:
            raise invalid("timeout", timeout, "microseconds, at least 1, or 0 for none")
        return self.clock() + timeout / 1e6 if timeout else None


_SAMPLING = tuple(setting.name for setting in fields(SamplingParams))


def _prompt(tensors: Tensors) -> tuple[int, ...]:
    if INPUT_IDS.name not in tensors:
        raise invalid(INPUT_IDS.name, None, "a prompt is needed")
    ids: tuple[int, ...] = from_tensor(INPUT_IDS, tensors[INPUT_IDS.name])
    if not ids:
        raise invalid(INPUT_IDS.name, ids, "at least one token id")
    return ids


def _prompt_text(tensors: Tensors) -> str:
    if PROMPT_TEXT.name not in tensors:
        raise invalid(EXCLUDE_INPUT.name, False, "true where prompt_text is not sent with it")
    text: str = from_tensor(PROMPT_TEXT, tensors[PROMPT_TEXT.name])
    return text


def _session(client: ClientRequest) -> SessionTurn | None:
    if not client.correlation_id:
        return None
    return SessionTurn(correlation_id=client.correlation_id, start=client.start, end=client.end)
