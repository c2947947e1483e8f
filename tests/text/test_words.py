"""Bad and bias words become the token runs that write them."""

from __future__ import annotations

import pytest

from grok1_backend.engine.errors import EngineError
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.text.words import bad_word_runs, word_biases


def texts(tokenizer: Tokenizer, runs: tuple[tuple[int, ...], ...]) -> list[bytes]:
    return [b"".join(map(tokenizer.token_bytes, run)) for run in runs]


def test_a_word_has_two_forms(grok: Tokenizer) -> None:
    assert bad_word_runs(grok, ["Paris"]) == ((49361,), (7435,))
    assert texts(grok, bad_word_runs(grok, ["Paris"])) == [b"Paris", b" Paris"]
    assert bad_word_runs(grok, ["  Paris", "Paris"]) == bad_word_runs(grok, ["Paris"])
    assert texts(grok, bad_word_runs(grok, ["San Francisco"])) == [
        b"San Francisco",
        b" San Francisco",
    ]


def test_covered_runs_are_left_out(grok: Tokenizer) -> None:
    # A llama has no piece, with a space or without: after a space come the same byte tokens.
    assert texts(grok, bad_word_runs(grok, ["🦙"])) == ["🦙".encode()]
    # The same between words: whatever is before it, the last token is banned.
    assert bad_word_runs(grok, ["a🦙", "🦙"]) == bad_word_runs(grok, ["🦙"])


def test_spaces_and_empty_words(grok: Tokenizer) -> None:
    assert texts(grok, bad_word_runs(grok, ["", "  "])) == [b"  "]
    assert bad_word_runs(grok, []) == ()
    assert word_biases(grok, [""], [1.0]) == ()


def test_control_names_are_ordinary_words(grok: Tokenizer) -> None:
    runs = bad_word_runs(grok, ["<|mask|>"])
    assert texts(grok, runs)[0] == b"<|mask|>"
    assert all(48 not in run for run in runs)


def test_limits_name_the_word(grok: Tokenizer) -> None:
    with pytest.raises(EngineError, match=r"bad_words is '日本+語': at most 8 tokens each"):
        bad_word_runs(grok, ["x", "日" + "本" * 40 + "語"])
    letters = [chr(ord("a") + i) + chr(ord("a") + j) for i in range(2) for j in range(17)]
    with pytest.raises(EngineError, match=r"number of bad_words is 34: .* 68 token runs .* 64"):
        bad_word_runs(grok, letters)
    assert SamplingParams(bad_words=bad_word_runs(grok, letters[:32])).bad_words


def test_biases_add_up(grok: Tokenizer) -> None:
    assert word_biases(grok, ["Paris"], [2.5]) == ((7435, 2.5), (49361, 2.5))
    assert word_biases(grok, ["Paris", " Paris"], [2.5, -1.0]) == ((7435, 1.5), (49361, 1.5))
    # Each token of a run, once a word, though the run has it twice.
    run = grok.encode("🦙🦙", continuation=True)
    assert word_biases(grok, ["🦙🦙"], [1.0]) == tuple(
        (token_id, 1.0) for token_id in sorted(set(run))
    )
    with pytest.raises(EngineError, match=r"embedding_bias_weights is 1: as many as .* \(2\)"):
        word_biases(grok, ["a", "b"], [1.0])


def test_tiny_model_without_the_shared_one(tiny: Tokenizer) -> None:
    assert texts(tiny, bad_word_runs(tiny, ["God"])) == [b"God", b" God"]
