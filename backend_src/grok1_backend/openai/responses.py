"""The server's replies turned into the answers of the OpenAI API, whole or chunk by chunk.

A whole answer is a chunk that holds everything: what makes one makes the other.
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grok1_backend.openai.translation import Call
from grok1_backend.openai.triton import Reply
from grok1_backend.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class ScoredToken:
    """A token with what the model thought of it and of others."""

    token_id: int
    log_prob: float | None
    """None for the first of a prompt, which nothing is known of."""
    top: Sequence[tuple[int, float]]
    """The most likely tokens with their log-probs, best first; the token itself is among them."""


def scored_tokens(call: Call, reply: Reply) -> Iterator[ScoredToken]:
    """The tokens of a reply, those of an echoed prompt first."""
    if call.echo and (log_probs := reply.rows("prompt_log_probs")):
        yield ScoredToken(call.prompt[0], None, ())
        rows = (
            call.prompt,
            log_probs,
            *map(reply.rows, ("prompt_top_ids", "prompt_top_log_probs")),
        )
        yield from _scored(call, [row[1:] for row in rows])
    names = ("token_ids", "output_log_probs", "top_token_ids", "top_log_probs")
    rows = tuple(map(reply.rows, names))
    if not call.log_probs:  # the columns have no rows then
        rows = (*rows[:2], *([[] for _ in rows[0]],) * 2)
    yield from _scored(call, rows)


def _scored(call: Call, rows: Sequence[list[Any]]) -> Iterator[ScoredToken]:
    for token_id, log_prob, top_ids, top_log_probs in zip(*rows, strict=True):
        top = list(zip(top_ids, top_log_probs, strict=True))[: call.log_probs]
        if all(token_id != other for other, _ in top):
            top.append((token_id, log_prob))
        yield ScoredToken(token_id, log_prob, top)


class Writer(Protocol):
    """Writes one answer."""

    def choice(self, reply: Reply) -> Json:
        """The whole answer."""
        ...

    def chunk(self, reply: Reply) -> Json:
        """The next part of it."""
        ...


class CompletionWriter:
    """Answers of `/v1/completions`."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._length = 0  # of the text so far
        self._decoded = 0  # characters of it that the tokens so far have begun
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = call.echo and tokenizer.adds_dummy_prefix

    def choice(self, reply: Reply) -> Json:
        """The text, and log-probs if they were asked for."""
        self._length += len(reply.text)
        return {
            "index": self._call.index,
            "text": reply.text,
            "logprobs": None if self._call.log_probs is None else self._log_probs(reply),
            "finish_reason": reply.finish_reason,
        }

    chunk = choice

    def _log_probs(self, reply: Reply) -> Json:
        tokens = list(scored_tokens(self._call, reply))
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._offset(token.token_id) for token in tokens],
        }

    def _top(self, token: ScoredToken) -> Json | None:
        if token.log_prob is None:
            return None
        top: Json = {}
        for token_id, log_prob in token.top:
            top.setdefault(self._name(token_id), log_prob)  # of two with one text, the likelier
        return top

    def _name(self, token_id: int) -> str:
        """The token's text; OpenAI's way to write bytes that are none."""
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _offset(self, token_id: int) -> int:
        """Where the token begins in the text; a token of a stop word is at its end."""
        offset = min(self._decoded, self._length)
        piece = self._tokenizer.token_bytes(token_id)
        if self._at_start:
            piece, self._at_start = piece.removeprefix(b" "), False
        self._decoded += len(self._decoder.decode(piece))
        return offset


class ChatWriter:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._begun = False

    def choice(self, reply: Reply) -> Json:
        """The message."""
        return self._with({"message": {"role": "assistant", "content": reply.text}}, reply)

    def chunk(self, reply: Reply) -> Json:
        """What is new of the message; its role comes first."""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return self._with({"delta": {**role, "content": reply.text}}, reply)

    def _with(self, what: Json, reply: Reply) -> Json:
        log_probs = None
        if self._call.log_probs is not None:
            log_probs = {"content": [self._token(t) for t in scored_tokens(self._call, reply)]}
        return {
            "index": self._call.index,
            **what,
            "logprobs": log_probs,
            "finish_reason": reply.finish_reason,
        }

    def _token(self, token: ScoredToken) -> Json:
        top = token.top[: self._call.log_probs]
        return {
            **self._named(token.token_id, token.log_prob),
            "top_logprobs": [self._named(*other) for other in top],
        }

    def _named(self, token_id: int, log_prob: float | None) -> Json:
        piece = self._tokenizer.token_bytes(token_id)
        return {"token": piece.decode(errors="replace"), "logprob": log_prob, "bytes": list(piece)}


@dataclass(frozen=True)
class Kind:
    """What the answers of an endpoint are called, and who writes them."""

    prefix: str
    whole: str
    part: str
    writer: Callable[[Call, Tokenizer], Writer]


COMPLETION = Kind("cmpl", "text_completion", "text_completion", CompletionWriter)
CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk", ChatWriter)


@dataclass
class Answer:
    """The answer to one request: all its choices, and the usage."""

    kind: Kind
    model: str
    calls: Sequence[Call]
    tokenizer: Tokenizer
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._writers = [self.kind.writer(call, self.tokenizer) for call in self.calls]
        self._output_tokens = [0] * len(self.calls)

    def whole(self, replies: Sequence[Reply]) -> Json:
        """All of it, from the one reply to each call."""
        for call, reply in zip(self.calls, replies, strict=True):
            self._count(call, reply)
        written = zip(self._writers, replies, strict=True)
        choices = [writer.choice(reply) for writer, reply in written]
        return {**self._head(self.kind.whole), "choices": choices, "usage": self._usage()}

    def chunk(self, call: Call, reply: Reply) -> Json:
        """The next part of one choice."""
        self._count(call, reply)
        choice = self._writers[call.index].chunk(reply)
        return {**self._head(self.kind.part), "choices": [choice]}

    def usage_chunk(self) -> Json:
        """What a stream ends with for those who want to know the usage."""
        return {**self._head(self.kind.part), "choices": [], "usage": self._usage()}

    def _head(self, name: str) -> Json:
        return {
            "id": f"{self.kind.prefix}-{self._id}",
            "object": name,
            "created": self._created,
            "model": self.model,
        }

    def _count(self, call: Call, reply: Reply) -> None:
        self._output_tokens[call.index] = reply.num_output_tokens

    def _usage(self) -> Json:
        prompt = sum(len(call.prompt) for call in self.calls if call.counts_prompt)
        completion = sum(self._output_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
