"""The tokenizer changes no byte of a text, and takes no text for a control token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.text.tokenizer import Tokenizer

CONTROL_NAMES = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "<|separator|>", "<|mask|>", "<|control20|>")
FRAGMENTS = (
    *CONTROL_NAMES,
    *("<", "|", ">", "<|", "|>", "<0x41>", "<s>", "</s>", "⁇", "\u2581", "\u2581\u2581"),
    *(" ", "  ", " " * 17, "\t", "\n", "\n" * 11, "\r\n", "\0", "\x7f", "\u00a0", "\u3000"),
    *("0", "42", "the", " the", "God", "naïve", "e\u0301", "\u0301", "ﬁ", "½", "Å", "\u212b"),
    *(
        "日本語",
        "中文字",
        "한국어",
        "שָׁלוֹם",
        "مرحبا",
        "\u202e",
        "\u200b",
        "\ufeff",
        "\ufffd",
        "\uffff",
    ),
    *("👩‍👩‍👧", "🏳️‍🌈", "🇺🇳", "👍🏽", "\U0010ffff"),
)
texts = st.one_of(
    st.text(), st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3))).map("".join)
)
checked = settings(derandomize=True, deadline=None, max_examples=500)


def check_round_trip(tokenizer: Tokenizer, text: str, control_ids: set[int]) -> None:
    for continuation in (False, True):
        ids = tokenizer.encode(text, continuation=continuation)
        assert tokenizer.decode(ids, continuation=continuation) == text.encode()
        assert control_ids.isdisjoint(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@checked
@given(text=texts)
def test_grok_round_trip(grok: Tokenizer, text: str) -> None:
    check_round_trip(grok, text, {0, 1, 2, 3, *range(47, 69)})


@settings(checked, max_examples=200)
@given(text=texts)
def test_tiny_round_trip(tiny: Tokenizer, text: str) -> None:
    check_round_trip(tiny, text, {0, 1, 2, 3, 5})


def test_control_tokens_are_where_the_tests_think(grok: Tokenizer, tiny: Tokenizer) -> None:
    named = [grok.token_bytes(token_id).decode() for token_id in range(47, 69)]
    assert named == ["<|separator|>", "<|mask|>", *(f"<|control{n}|>" for n in range(1, 21))]
    assert tiny.token_bytes(5) == b"<|separator|>"
    for tokenizer in (grok, tiny):
        assert [tokenizer.token_bytes(token_id) for token_id in range(4)] == [
            b"",
            b"",
            b"",
            b"[UNK]",
        ]
        ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id)
        assert ids == (0, 1, 2, 3)


@checked
@given(text=texts)
def test_grok_ids_are_those_of_sentencepiece(
    grok: Tokenizer, original: SentencePieceProcessor, text: str
) -> None:
    """But for the two differences that the module names."""
    assume("\u2581" not in text and not any(name in text for name in CONTROL_NAMES[4:]))
    assert grok.encode(text) == original.encode(text)


@checked
@given(ids=st.lists(st.integers(0, 131071)))
def test_grok_text_is_that_of_sentencepiece(
    grok: Tokenizer, original: SentencePieceProcessor, ids: list[int]
) -> None:
    """Where the byte pieces make characters; SentencePiece has no bytes to give elsewhere.

    Nor does it take the first space of the pieces of plain spaces, which `encode` never writes.
    """
    ids = [id_ for id_ in ids if not original.is_byte(id_) and id_ not in range(32, 47)]
    ids += original.encode("🦙")[1:]
    assert grok.decode(ids).decode() == original.decode(ids)


def test_known_ids(grok: Tokenizer) -> None:
    assert grok.vocab_size == 131072
    assert grok.adds_dummy_prefix
    assert grok.encode("Hello") == [11770]  # '▁Hello'
    assert grok.encode("") == []
    assert grok.encode("\nfoo") == [130089, 4, 12228]  # '▁', newline, 'foo'
    assert grok.encode("\nfoo", continuation=True) == [4, 12228]
    assert grok.encode(" Hello", continuation=True) == [11770]
    assert grok.decode([11770, 11770]) == b"Hello Hello"
    assert grok.decode([11770, 11770], continuation=True) == b" Hello Hello"
    assert [grok.token_bytes(token_id) for token_id in (69, 324)] == [b"\x00", b"\xff"]


def test_without_dummy_prefix_a_continuation_is_nothing_else(tiny: Tokenizer) -> None:
    same = tiny.encode("God") == tiny.encode("God", continuation=True)
    assert same is not tiny.adds_dummy_prefix


@pytest.mark.parametrize("token_id", [-1, 131072, 2**31])
def test_unknown_ids_are_refused(grok: Tokenizer, token_id: int) -> None:
    with pytest.raises(EngineError, match=rf"token id is {token_id}: 0 to 131071") as caught:
        grok.token_bytes(token_id)
    assert caught.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(EngineError, match="token id"):
        grok.decode([5, token_id])


def test_lone_surrogates_are_refused(grok: Tokenizer) -> None:
    with pytest.raises(EngineError, match="surrogate code point, as there is at index 1"):
        grok.encode("a\ud800")


def test_unusable_models_are_refused(model_without_bytes: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="byte fallback"):
        Tokenizer(model_without_bytes)
    broken = tmp_path / "tokenizer.model"
    for content in (b"", b"not a model"):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            Tokenizer(broken)
    with pytest.raises(FileNotFoundError):
        Tokenizer(tmp_path / "absent.model")
