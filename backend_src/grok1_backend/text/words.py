"""Words that a caller bans or favours, as the token runs that the sampler understands.

A word has one tokenisation at the start of a line or after a bracket and another after a space
(`Paris`, `▁Paris`). As in vLLM, spaces before the word are taken off and both are used. A run
that ends in another run of the same list says nothing more and is left out: a banned `cat`
covers `▁ cat`. A model can still write a word in pieces that the tokenizer would not choose:
bad words make that word unlikely, not impossible.

Empty words are skipped: clients of tensorrtllm_backend send one to say "none".
"""

from __future__ import annotations

from collections.abc import Sequence

from grok1_backend.engine.errors import invalid
from grok1_backend.engine.requests import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from grok1_backend.text.tokenizer import Tokenizer

Run = tuple[int, ...]


def bad_word_runs(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Run, ...]:
    """`SamplingParams.bad_words` for a list of words.

    Raises:
      EngineError: INVALID_ARG for a word of too many tokens, or too many runs in all.
    """
    runs: list[Run] = []
    for word in words:
        for run in _word_runs(tokenizer, word):
            if len(run) > MAX_BAD_WORD_TOKENS:
                limit = f"at most {MAX_BAD_WORD_TOKENS} tokens each, and this has {len(run)}"
                raise invalid("bad_words", word, limit)
            runs.append(run)
    runs = _without_covered(runs)
    if len(runs) > MAX_BAD_WORDS:
        limit = f"they make {len(runs)} token runs (with and without a space before), at most "
        raise invalid("the number of bad_words", len(words), f"{limit}{MAX_BAD_WORDS} are allowed")
    return tuple(runs)


def word_biases(
    tokenizer: Tokenizer, words: Sequence[str], weights: Sequence[float]
) -> tuple[tuple[int, float], ...]:
    """`SamplingParams.logit_bias` for `embedding_bias_words` and `embedding_bias_weights`.

    As in tensorrtllm_backend, a word's weight is added to each of its tokens, and the weights
    of words that share a token add up. A token that a word has twice counts once.

    Raises:
      EngineError: INVALID_ARG where the numbers of words and weights differ.
    """
    if len(words) != len(weights):
        limit = f"as many as there are embedding_bias_words ({len(words)})"
        raise invalid("the number of embedding_bias_weights", len(weights), limit)
    biases: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        runs = _without_covered(_word_runs(tokenizer, word))
        for token_id in {token_id for run in runs for token_id in run}:
            biases[token_id] = biases.get(token_id, 0.0) + weight
    return tuple(sorted(biases.items()))


def _word_runs(tokenizer: Tokenizer, word: str) -> list[Run]:
    """A word's tokens without and with a space before it; an all-space word's as it is."""
    bare = word.lstrip(" ")
    texts = (bare, " " + bare) if bare else (word,)
    runs = (tuple(tokenizer.encode(text, continuation=True)) for text in texts)
    return [run for run in runs if run]


def _without_covered(runs: Sequence[Run]) -> list[Run]:
    """The distinct runs that do not end in another of the runs, in order."""
    distinct = dict.fromkeys(runs)
    return [
        run for run in distinct if not any(run[start:] in distinct for start in range(1, len(run)))
    ]
