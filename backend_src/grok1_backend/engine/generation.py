"""The host's state of one request, from its submission to its last event.

Owns the tokens, what is known about them, and what of them was sent. Owns neither slot nor pages:
it only carries the scheduler's notes about them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.kv_pages import BlockTable
from grok1_backend.engine.requests import (
    TOP_TOKENS,
    EventSink,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow, PromptScores
from grok1_backend.engine.sessions import Session
from grok1_backend.text.stream import TextStream

logger = logging.getLogger(__name__)

TokenBytes = Callable[[int], bytes]
Ending = tuple[FinishReason, EngineError | None, int]
"""Why a request ends, its error if it failed, and how many bytes of its text are not shown."""

_NO_LOG_PROBS = np.empty(0, np.float32)
_NO_TOP_IDS = np.empty((0, TOP_TOKENS), np.int32)
_NO_TOP_LOG_PROBS = np.empty((0, TOP_TOKENS), np.float32)


class Generation:
    """One request on its way. Only the scheduler thread touches it once it is submitted."""

    def __init__(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        sink: EventSink,
        *,
        token_bytes: TokenBytes | None,
        now: float,
    ) -> None:
        """Takes the request in.

        Args:
          request: as submitted.
          sampling: the request's, with seed and end_ids set.
          sink: gets the events.
          token_bytes: for the text filter; None without a tokenizer.
          now: seconds.

        Raises:
          EngineError: INVALID_ARG for stop words without a tokenizer.
        """
        self.request = request
        self.sampling = sampling
        self.priority = request.priority
        self.arrival = 0
        """Its number in the order of submission; the engine sets it."""
        self.session: Session | None = None
        """The one whose turn this is; the engine sets it."""
        self.submitted_at = now
        self._sink: EventSink = sink
        self._token_bytes = token_bytes
        self._text = TextStream(token_bytes, sampling.stop_words)
        self._end_ids = frozenset(() if sampling.ignore_eos else sampling.end_ids or ())

        self.tokens: NDArray[np.int32] = np.asarray(request.prompt, np.int32)
        """The prompt; from `begin` on, [limit]: context and output, `length` of them known."""
        self.length = self.num_prompt = self.limit = len(self.tokens)
        self.begun = False
        self._sent = 0
        self._cum_log_prob = 0.0
        self._last_token_at = now
        self.num_scored = 0
        """Prompt tokens whose scores have come."""
        self._prompt_log_probs: NDArray[np.float32] | None = None
        self._prompt_top_ids: NDArray[np.int32] | None = None
        self._prompt_top_log_probs: NDArray[np.float32] | None = None

        # The scheduler's notes.
        self.started_at: float | None = None
        """When it got its first slot."""
        self.epoch = 0
        """Counts the slots it gave up: what was dispatched in an earlier epoch is not its own."""
        self.slot = -1
        self.table = BlockTable()
        self.tail_end = 0
        """Where the KV ends that its session, or itself when preempted, left behind."""
        self.dispatched = 0
        """Positions whose KV is written or dispatched to be."""
        self.prefill_end = 0
        """Positions that prefill writes; decode steps write the later ones."""
        self.decode_row = DecodeRow(slot=-1, pages=())

    def begin(self) -> None:
        """Joins the session's history and the prompt, and makes room for the output."""
        prompt, max_tokens = self.tokens, self.sampling.max_tokens
        history = prompt[:0] if self.session is None else self.session.history
        self.num_prompt = self.length = len(history) + len(prompt)
        self.limit = self.length + max_tokens
        self.tokens = np.empty(self.limit, np.int32)
        self.tokens[: len(history)] = history
        self.tokens[len(history) : self.length] = prompt
        self.tail_end = 0 if self.session is None else self.session.tail_end
        self._log_probs = np.empty(max_tokens, np.float32)
        self._top_ids = np.empty((max_tokens, TOP_TOKENS), np.int32)
        self._top_log_probs = np.empty((max_tokens, TOP_TOKENS), np.float32)
        self.begun = True

    @property
    def num_output(self) -> int:
        """Tokens drawn so far, those held back included."""
        return self.length - self.num_prompt

    @property
    def unscored(self) -> bool:
        """Whether the prompt has still to be scored."""
        return self.request.return_prompt_log_probs and self.num_output == 0

    def occupy(self, slot: int, table: BlockTable) -> None:
        """Gets a slot and pages for all known tokens."""
        self.slot, self.table = slot, table
        self.dispatched, self.prefill_end = table.reused, self.length
        self.decode_row = DecodeRow(slot=slot, pages=table.pages)
        self.num_scored = 0

    def leave_slot(self) -> tuple[BlockTable, int]:
        """Loses its slot and pages: returns the pages, and the positions they hold KV of."""
        table = self.table
        # The step ahead may already have written the KV of the last token.
        self.tail_end = min(self.dispatched, self.length)
        self.slot, self.table, self.dispatched = -1, BlockTable(), 0
        self.epoch += 1
        return table, self.tail_end

    def token_after(self, row: PrefillRow) -> int:
        """The known token that follows the row's tokens, or -1."""
        end = row.start + len(row.tokens)
        return int(self.tokens[end]) if end < self.length else -1

    def accept(
        self,
        token: int,
        log_prob: float,
        top_ids: NDArray[np.int32],
        top_log_probs: NDArray[np.float32],
        finite: bool,
    ) -> Ending | None:
        """Adds a drawn token.

        Returns:
          How the request ends with it, if it does. An end token is an output token like others,
          but has no text.

        Raises:
          EngineError: the logits were not finite, or the tokenizer does not know the token.
        """
        if not finite:
            raise _not_finite()
        index = self.length - self.num_prompt
        self.tokens[self.length] = token
        self._log_probs[index] = log_prob
        self._top_ids[index] = top_ids
        self._top_log_probs[index] = top_log_probs
        self.length += 1
        if token in self._end_ids:
            trim = len(self._token_bytes(token)) if self._token_bytes else 0
            return FinishReason.STOP, None, trim
        released = self._text.push(token, stop_allowed=index + 1 >= self.sampling.min_tokens)
        if released.stopped:
            return FinishReason.STOP, None, released.text_trim
        if self.length == self.limit:
            return FinishReason.LENGTH, None, 0
        if released.num_tokens and self.request.stream:
            self._send(self._sent + released.num_tokens)
        return None

    def score(self, scores: PromptScores) -> None:
        """Keeps the scores of the next prefilled tokens.

        Raises:
          EngineError: the logits were not finite.
        """
        if (
            self._prompt_log_probs is None
            or self._prompt_top_ids is None
            or self._prompt_top_log_probs is None
        ):
            self._prompt_log_probs = np.zeros(self.num_prompt, np.float32)
            self._prompt_top_ids = np.full((self.num_prompt, TOP_TOKENS), -1, np.int32)
            self._prompt_top_log_probs = np.zeros((self.num_prompt, TOP_TOKENS), np.float32)
        start = self.num_scored + 1  # entry i is about the token after token i
        self.num_scored += len(scores.log_probs)
        count = min(self.num_scored + 1, self.num_prompt) - start
        if not np.isfinite(scores.log_probs[:count]).all():
            raise _not_finite()
        self._prompt_log_probs[start : start + count] = scores.log_probs[:count]
        self._prompt_top_ids[start : start + count] = scores.top_ids[:count]
        self._prompt_top_log_probs[start : start + count] = scores.top_log_probs[:count]

    def ending_without_output(self) -> Ending | None:
        """How a request with max_tokens 0 ends, once its prompt is scored."""
        return (FinishReason.LENGTH, None, 0) if self.num_scored == self.limit else None

    def since_last_token(self, now: float) -> float:
        """Seconds from the token before (or the submission) to this one."""
        gap = now - self._last_token_at
        self._last_token_at = now
        return gap

    def finish(
        self, reason: FinishReason, error: EngineError | None = None, text_trim: int = 0
    ) -> None:
        """Sends the last event, with every token not yet sent."""
        if error is not None:
            self._forget_prompt_scores()  # perhaps not complete
        self._send(self.length - self.num_prompt, reason, error, text_trim)
        self._sink = _drop  # whoever still holds this request must not hold its client

    def _send(
        self,
        upto: int,
        reason: FinishReason | None = None,
        error: EngineError | None = None,
        text_trim: int = 0,
    ) -> None:
        start, self._sent = self._sent, upto
        if upto > start:
            first = self.num_prompt
            token_ids = tuple(self.tokens[first + start : first + upto].tolist())
            log_probs = self._log_probs[start:upto]
            top_ids, top_log_probs = self._top_ids[start:upto], self._top_log_probs[start:upto]
            self._cum_log_prob += sum(log_probs.tolist())
        else:
            token_ids, log_probs = (), _NO_LOG_PROBS
            top_ids, top_log_probs = _NO_TOP_IDS, _NO_TOP_LOG_PROBS
        event = TokenEvent(
            request_id=self.request.request_id,
            token_ids=token_ids,
            log_probs=log_probs,
            top_ids=top_ids,
            top_log_probs=top_log_probs,
            text_trim=text_trim,
            cum_log_prob=self._cum_log_prob,
            num_input_tokens=self.num_prompt,
            num_output_tokens=upto,
            finish_reason=reason,
            error=error,
            prompt_log_probs=self._prompt_log_probs,
            prompt_top_ids=self._prompt_top_ids,
            prompt_top_log_probs=self._prompt_top_log_probs,
        )
        self._forget_prompt_scores()
        try:
            self._sink(event)
        except Exception:
            logger.exception("request %r: its sink raised; events are dropped", event.request_id)
            self._sink = _drop

    def _forget_prompt_scores(self) -> None:
        self._prompt_log_probs = self._prompt_top_ids = self._prompt_top_log_probs = None


def _not_finite() -> EngineError:
    return EngineError(ErrorCode.INTERNAL, "the model's logits are not finite")


def _drop(event: TokenEvent) -> None:
    """The sink of a request that has ended, or whose own sink raised."""
