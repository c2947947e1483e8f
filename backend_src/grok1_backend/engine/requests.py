"""The messages between the engine and whoever calls it: a request in, token events out.

Frozen dataclasses of plain Python values and NumPy arrays; no JAX, no Triton. A request is
validated at construction (what can be judged without the model) and again by the engine
(vocabulary and context length).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.errors import EngineError, invalid

TOP_TOKENS = 8
"""How many of the most likely tokens come back with each chosen one (`top_k` of the log-probs)."""

MAX_STOP_WORDS = 64
MAX_STOP_WORD_BYTES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
MAX_LOGIT_BIAS = 512
MAX_END_IDS = 8


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it stops.

    The sampler applies: penalties and bias, bad words, temperature, top-k, top-p, min-p, draw.
    Temperature 0, top-p 0 or top-k 1 is argmax.
    """

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    seed: int | None = None
    """Unsigned 64-bit. None draws one; the same seed gives the same tokens in any batch."""
    max_tokens: int = 128
    min_tokens: int = 0
    """End ids cannot be drawn, and stop words do not stop, before this many tokens."""
    ignore_eos: bool = False
    """Do not stop at end ids; they are ordinary tokens then."""
    end_ids: tuple[int, ...] | None = None
    """Token ids that end the output; None takes the model's."""
    stop_words: tuple[bytes, ...] = ()
    """Byte strings (UTF-8 text) that end the output and are not part of it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token runs whose last token may not follow the others."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When given, only these can be drawn."""

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.end_ids is not None:
            _check_count("end_ids", self.end_ids, MAX_END_IDS)
        _check_count("stop_words", self.stop_words, MAX_STOP_WORDS)
        for word in self.stop_words:
            if not 1 <= len(word) <= MAX_STOP_WORD_BYTES:
                raise invalid("stop_words", word, f"1 to {MAX_STOP_WORD_BYTES} bytes each")
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        for run in self.bad_words:
            if not 1 <= len(run) <= MAX_BAD_WORD_TOKENS:
                raise invalid("bad_words", run, f"1 to {MAX_BAD_WORD_TOKENS} tokens each")
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -1e4, 1e4)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid("allowed_token_ids", self.allowed_token_ids, "at least one token id")

    @property
    def greedy(self) -> bool:
        """Whether the choice is argmax (after penalties, bias and bad words)."""
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before the temperature: such rows need the full sampler."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
        )

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p restricts the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, kw_only=True)
class SessionTurn:
    """Marks a request as a turn of a sequence (Triton's words: correlation id, START, END)."""

    correlation_id: int | str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids. In a session: only the new ones of this turn."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Higher is served first; first come, first served inside a priority."""
    deadline: float | None = None
    """`time.monotonic()` seconds after which the request ends with DEADLINE_EXCEEDED."""
    session: SessionTurn | None = None
    return_prompt_log_probs: bool = False
    """Then max_tokens 0 is legal and the prefix cache is not used."""
    stream: bool = True
    """False: one event at the end holds all tokens."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise invalid("prompt", self.prompt, "at least one token")
        if self.sampling.max_tokens == 0 and not self.return_prompt_log_probs:
            raise invalid("max_tokens", 0, "at least 1, or 0 with return_prompt_log_probs")
        if not -(2**31) <= self.priority < 2**31:
            raise invalid("priority", self.priority, "a 32-bit signed integer")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEvent:
    """A group of tokens of one request that may be shown, or its end.

    The text of the group is the concatenation of its tokens' bytes less the last `text_trim`
    bytes, and is valid UTF-8 unless the model itself wrote otherwise and the request has ended.
    The last event of a request, and only that one, has `finish_reason`; it may hold no tokens.
    An end token and the tokens of a stop word are output tokens; `text_trim` takes their text.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: NDArray[np.float32]  # [tokens]: of each chosen token, before temperature
    top_ids: NDArray[np.int32]  # [tokens, TOP_TOKENS]
    top_log_probs: NDArray[np.float32]  # [tokens, TOP_TOKENS]
    text_trim: int = 0
    cum_log_prob: float = 0.0
    """Sum of the log-probs of all output tokens so far."""
    num_input_tokens: int = 0
    """Of the whole context of this request, a session's earlier turns included."""
    num_output_tokens: int = 0
    """So far, this event included."""
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    """Set when finish_reason is ERROR or CANCELLED."""
    prompt_log_probs: NDArray[np.float32] | None = None
    """[num_input_tokens]: of each token given those before it; the first is 0. First event only."""
    prompt_top_ids: NDArray[np.int32] | None = None
    """[num_input_tokens, TOP_TOKENS]: the most likely ones at each position; row 0 is -1."""
    prompt_top_log_probs: NDArray[np.float32] | None = None
    """[num_input_tokens, TOP_TOKENS]: their log-probs; row 0 is 0."""


EventSink = Callable[[TokenEvent], None]
"""Called by the scheduler thread, in order, exactly once with a finish reason. Must not block."""


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise invalid(name, value, f"a finite number from {low:g} to {high:g}")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise invalid(name, value, f"an integer from {low} to {high}")


def _check_count(name: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise invalid(f"the number of {name}", len(values), f"at most {most}")
