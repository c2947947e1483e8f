"""Which tokens of a growing output may be shown, and where a stop word ends it.

The engine cuts an output into groups of tokens here; `group_text` turns each group into text
with no memory of those before it, and the texts joined are the text of the whole.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from grok1_backend.engine.errors import invalid
from grok1_backend.text.stop_matcher import StopMatcher


@dataclass(frozen=True, slots=True)
class Released:
    """The oldest tokens not yet shown, to be shown now as one group."""

    num_tokens: int
    stopped: bool = False
    """A stop word is complete: this is the last group, and it holds all tokens."""
    text_trim: int = 0
    """How many bytes at the end of the group are not shown: the stop word and what follows it."""


class TextStream:
    """Follows the output tokens of one request.

    A group ends between characters, and before anything that may still become a stop word.
    Bytes that cannot become a character any more do not wait for one, so what is held back
    beyond an unfinished stop word is at most three bytes and the tokens that hold them.

    Of several stop words the one that is complete first stops the output; of those complete at
    the same byte, the longest. So the text depends on the bytes of the output alone, not on how
    they are cut into tokens.

    Each byte costs amortised constant time. Not thread-safe.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes] | None, stop_words: Sequence[bytes] = ()
    ) -> None:
        """Starts an empty output.

        Args:
          token_bytes: the bytes of a token (`Tokenizer.token_bytes`); None where there is no
            tokenizer: then each token is a group.
          stop_words: none of them empty.

        Raises:
          EngineError: INVALID_ARG for stop words without a tokenizer.
        """
        if stop_words and token_bytes is None:
            raise invalid("stop_words", stop_words, "none where the engine has no tokenizer")
        self._token_bytes = token_bytes
        self._matcher = StopMatcher(stop_words)
        self._state = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_bytes = 0
        self._num_tokens = 0
        self._num_released = 0
        # Where groups may end by UTF-8: (bytes, tokens) of the output up to there.
        self._boundaries: deque[tuple[int, int]] = deque()

    def push(self, token_id: int, *, stop_allowed: bool = True) -> Released:
        """Adds the next token. After `stopped` nothing may be added.

        Args:
          token_id: of the next output token.
          stop_allowed: False where the output would end before its min_tokens: a stop word that
            this token completes is ordinary text then. One that begins in such a token and is
            complete in a later one does stop.

        Raises:
          EngineError: as `Tokenizer.token_bytes`.
        """
        if self._token_bytes is None:
            self._num_tokens += 1
            return self._release(self._num_tokens)
        piece = self._token_bytes(token_id)
        self._num_tokens += 1
        for used, byte in enumerate(piece, start=1):
            self._state = self._matcher.step(self._state, byte)
            matched = self._matcher.matched[self._state]
            if matched and stop_allowed:
                trim = matched + len(piece) - used
                return self._release(self._num_tokens, stopped=True, text_trim=trim)
        self._num_bytes += len(piece)
        self._decoder.decode(piece)
        unfinished_character, _ = self._decoder.getstate()
        if not unfinished_character:
            self._boundaries.append((self._num_bytes, self._num_tokens))
        showable = self._num_bytes - self._matcher.open[self._state]
        upto = self._num_released
        while self._boundaries and self._boundaries[0][0] <= showable:
            upto = self._boundaries.popleft()[1]
        return self._release(upto)

    def finish(self) -> Released:
        """The output has ended otherwise (end id, length, cancelled): releases what is left."""
        return self._release(self._num_tokens)

    def _release(self, upto: int, *, stopped: bool = False, text_trim: int = 0) -> Released:
        num_tokens = upto - self._num_released
        self._num_released = upto
        return Released(num_tokens, stopped, text_trim)


def group_text(
    token_bytes: Callable[[int], bytes], token_ids: Iterable[int], text_trim: int = 0
) -> str:
    """The text of one released group.

    Bytes that are not UTF-8 become U+FFFD. As a group ends between characters, that is the
    model's own doing, or the end of an output in mid-character; so the texts of an output's
    groups, joined, are the text of all its tokens, whatever the groups.

    Args:
      token_bytes: `Tokenizer.token_bytes`.
      token_ids: of the group.
      text_trim: how many bytes to leave out at the end.

    Raises:
      EngineError: INVALID_ARG for a text_trim that is negative or longer than the group, and as
        `Tokenizer.token_bytes`.
    """
    joined = b"".join(map(token_bytes, token_ids))
    if not 0 <= text_trim <= len(joined):
        raise invalid("text_trim", text_trim, f"0 to the {len(joined)} bytes of the tokens")
    return joined[: len(joined) - text_trim].decode(errors="replace")
