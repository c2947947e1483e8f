"""A request of the OpenAI API turned into calls of `grok1_generate`, one for each answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput

from grok1_backend.openai.errors import bad_field
from grok1_backend.openai.requests import ChatRequest, CompletionRequest, Message, Request
from grok1_backend.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`, as at OpenAI."""

_ALWAYS = ("text_output", "finish_reason", "token_ids", "num_output_tokens")
_LOG_PROBS = ("output_log_probs", "top_token_ids", "top_log_probs")
_PROMPT_LOG_PROBS = ("prompt_log_probs", "prompt_top_ids", "prompt_top_log_probs")

Render = Callable[[Sequence[Message]], str]
"""Makes the prompt of a chat."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the server is asked for one answer."""

    index: int
    """Of the answer among those of its request."""
    prompt: list[int]
    settings: dict[str, Any]
    """In the names of `sampling_parameters`."""
    echo: bool = False
    """The prompt's text goes before the answer's."""
    log_probs: int | None = None
    """How many of the most likely tokens come with each token; None: no log-probs at all."""
    counts_prompt: bool = True
    """Whether the prompt counts in the usage: that of several answers counts once."""

    @property
    def inputs(self) -> list[InferInput]:
        """The tensors."""
        settings = {**self.settings, "exclude_input_in_output": not self.echo}
        if self.log_probs is not None:
            settings["logprobs"] = self.log_probs
        if self.scores_prompt:
            settings["prompt_logprobs"] = 1
        return [
            _tensor("input_ids", "INT32", np.array([self.prompt], np.int32)),
            _tensor(
                "sampling_parameters",
                "BYTES",
                np.array([[json.dumps(settings).encode()]], np.object_),
            ),
        ]

    @property
    def outputs(self) -> list[InferRequestedOutput]:
        """What is to come back: the server keeps all of it in memory until the answer ends."""
        names = _ALWAYS
        if self.log_probs is not None:
            names += (*_LOG_PROBS, *(_PROMPT_LOG_PROBS if self.echo else ()))
        return [InferRequestedOutput(name) for name in names]

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probs are computed; without a token there is nothing else."""
        return self.echo and (self.log_probs is not None or self.settings["max_tokens"] == 0)


def completion_calls(request: CompletionRequest, tokenizer: Tokenizer) -> list[Call]:
    """The calls for each prompt in turn, `n` for each.

    Raises:
      ApiError: a prompt without tokens.
      EngineError: a text that is not Unicode.
    """
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    calls: list[Call] = []
    for prompt in request.prompt:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        _check("prompt", ids, prompt, tokenizer)
        calls += _answers(
            request,
            ids,
            {"max_tokens": max_tokens},
            first=len(calls),
            echo=bool(request.echo),
            log_probs=request.logprobs,
        )
    return calls


def chat_calls(request: ChatRequest, tokenizer: Tokenizer, render: Render) -> list[Call]:
    """The calls for a chat; without a limit on tokens the server's default holds.

    Raises:
      ApiError: the template makes no prompt of the messages.
      EngineError: a text that is not Unicode.
    """
    text = render(request.messages)
    ids = tokenizer.encode(text)
    _check("messages", ids, text, tokenizer)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    return _answers(
        request,
        ids,
        {} if max_tokens is None else {"max_tokens": max_tokens},
        log_probs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _answers(
    request: Request,
    prompt: list[int],
    settings: dict[str, Any],
    *,
    first: int = 0,
    **options: Any,
) -> list[Call]:
    settings = request.settings() | settings | {"stream": bool(request.stream)}
    return [
        Call(
            index=first + number,
            prompt=prompt,
            settings=settings | _seed(request.seed, number),
            counts_prompt=number == 0,
            **options,
        )
        for number in range(request.num_answers)
    ]


def _seed(seed: int | None, number: int) -> dict[str, int]:
    """Answers to one prompt have seeds of their own; the server takes unsigned ones."""
    return {} if seed is None else {"seed": (seed + number) % 2**64}


def _check(field: str, ids: Sequence[int], given: object, tokenizer: Tokenizer) -> None:
    if not ids:
        raise bad_field(field, given, "at least one token")
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise bad_field(field, token_id, f"token ids are 0 to {tokenizer.vocab_size - 1}")


def _tensor(name: str, kind: str, array: NDArray[Any]) -> InferInput:
    made = InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made
