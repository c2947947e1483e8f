"""The requests of the OpenAI API that are served, field by field.

Only types are checked here: the limits of numbers are the engine's, and its errors name them. A
field that is null has its default, and a field that is not listed is refused, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from grok1_backend.engine.requests import TOP_TOKENS

MAX_ANSWERS = 128
"""The most answers of one request: its prompts times `n`."""


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    prompts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not prompts or not all(isinstance(p, str) or _is_token_ids(p) for p in prompts):
        raise ValueError("a text, a list of texts, a list of token ids, or a list of such lists")
    return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Model):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is obfuscated: neither value changes anything


class SamplingSettings(_Model):
    """Fields that go to the engine as they are, by the names of its `sampling_parameters`."""

    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    logit_bias: dict[str, float] | None = None
    # Not OpenAI's, but vLLM's and TensorRT-LLM's; the openai package sends them by `extra_body`.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None

    def settings(self) -> dict[str, Any]:
        """Those that were given."""
        return self.model_dump(include=set(SamplingSettings.model_fields), exclude_none=True)


class Request(SamplingSettings):
    """What both kinds of requests have."""

    model: str
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # for abuse monitoring at OpenAI; ignored

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for requests with stream true only")
        return self


class CompletionRequest(Request):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP_TOKENS)] | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of not in (None, self.num_answers):
            raise ValueError(
                f"best_of is {self.best_of}: the same as n ({self.num_answers}), or left out"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: at least 1, or 0 with echo")
        if len(self.prompt) * self.num_answers > MAX_ANSWERS:
            raise ValueError(
                f"{len(self.prompt)} prompts with n {self.num_answers} are "
                f"{len(self.prompt) * self.num_answers} answers: at most {MAX_ANSWERS} in a request"
            )
        return self


class TextPart(_Model):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """A message of a chat."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message with its content as one text."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": content, **named}


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_TOKENS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs to be true")
        return self


class TokenizeRequest(BaseModel):
    """`POST /tokenize`, as vLLM has it; other fields are ignored."""

    prompt: str


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`, as vLLM has it; other fields are ignored."""

    tokens: Sequence[int]
