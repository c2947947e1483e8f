"""What a stream shows, holds back and cuts, against plain searches over the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grok1_backend.engine.errors import EngineError
from grok1_backend.text.stop_matcher import StopMatcher
from grok1_backend.text.stream import Released, TextStream, group_text
from grok1_backend.text.tokenizer import Tokenizer

checked = settings(derandomize=True, deadline=None, max_examples=1000)

# Few letters make many near-matches; the parts of '€' and '👍' make broken characters.
ALPHABET = (b"a", b"b", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x91\x8d", b"\xc0", "é".encode())
pieces = st.lists(st.sampled_from(ALPHABET), max_size=4).map(b"".join)
outputs = st.lists(pieces, max_size=20)
stop_word = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map(b"".join)
stop_lists = st.lists(stop_word, max_size=4)


def text_of(pieces: Sequence[bytes], text_trim: int = 0) -> str:
    return group_text(pieces.__getitem__, range(len(pieces)), text_trim)


def run(
    output: Sequence[bytes], stop_words: Sequence[bytes], min_tokens: int = 0
) -> tuple[list[list[bytes]], int, bool]:
    """The groups that a stream makes of the pieces, the trim of the last, whether it stopped."""
    stream = TextStream(output.__getitem__, stop_words)
    groups: list[list[bytes]] = []
    shown = 0
    for i in range(len(output)):
        released = stream.push(i, stop_allowed=i + 1 > min_tokens)
        assert released.stopped or released.text_trim == 0
        if released.num_tokens:
            groups.append(list(output[shown : shown + released.num_tokens]))
        shown += released.num_tokens
        if released.stopped:
            assert shown == i + 1
            return groups, released.text_trim, True
    released = stream.finish()
    assert released == Released(len(output) - shown)
    groups.append(list(output[shown:]))
    return groups, 0, False


def naive_stop(
    output: Sequence[bytes], stop_words: Sequence[bytes], min_tokens: int = 0
) -> tuple[int, bytes] | None:
    """How many tokens the output has when a stop word ends it, and its text without the word."""
    text = b"".join(output)
    free = len(b"".join(output[:min_tokens]))
    for end in range(free + 1, len(text) + 1):
        ends = [len(word) for word in stop_words if text[:end].endswith(word)]
        if ends:
            lengths = [len(b"".join(output[: n + 1])) for n in range(len(output))]
            num_tokens = next(n for n, length in enumerate(lengths, 1) if length >= end)
            return num_tokens, text[: end - max(ends)]
    return None


def unfinished(text: bytes) -> bool:
    """Whether the text ends in the first bytes of a character, by trying the rest of it."""
    rests = [bytes([first]) + b"\x80" * n for first in (0x80, 0x90, 0xA0) for n in range(3)]
    for rest in rests:
        for size in (1, 2, 3):
            try:
                if len(text) >= size and len((text[-size:] + rest).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def naive_num_shown(output: Sequence[bytes], stop_words: Sequence[bytes]) -> int:
    """The most tokens of an unfinished output that may be shown."""
    text = b"".join(output)
    begun = (i for i in range(len(text)) for word in stop_words if is_begun(text[i:], word))
    limit = min(begun, default=len(text))
    for num_tokens in range(len(output), 0, -1):
        shown = b"".join(output[:num_tokens])
        if len(shown) <= limit and not unfinished(shown):
            return num_tokens
    return 0


def is_begun(end: bytes, word: bytes) -> bool:
    return len(end) < len(word) and word.startswith(end)


@checked
@given(output=outputs, stop_words=stop_lists, min_tokens=st.integers(0, 5))
def test_stops_like_a_search_over_the_whole_text(
    output: list[bytes], stop_words: list[bytes], min_tokens: int
) -> None:
    groups, trim, stopped = run(output, stop_words, min_tokens)
    shown = b"".join(piece for group in groups for piece in group)
    expected = naive_stop(output, stop_words, min_tokens)
    assert stopped == (expected is not None)
    if expected is None:
        assert shown == b"".join(output)
    else:
        assert (sum(map(len, groups)), shown[: len(shown) - trim]) == expected
        assert trim <= len(b"".join(groups[-1])), "text shown before belongs to the stop word"


@checked
@given(output=outputs, stop_words=stop_lists)
def test_shows_all_that_may_be_shown_and_no_more(
    output: list[bytes], stop_words: list[bytes]
) -> None:
    stream = TextStream(output.__getitem__, stop_words)
    shown = 0
    for i in range(len(output)):
        # Stop words that may not stop keep being watched for.
        shown += stream.push(i, stop_allowed=False).num_tokens
        assert shown == naive_num_shown(output[: i + 1], stop_words)
    assert stream.finish() == Released(len(output) - shown)


@checked
@given(output=outputs, stop_words=stop_lists)
def test_joined_groups_are_the_text_of_the_whole(
    output: list[bytes], stop_words: list[bytes]
) -> None:
    groups, trim, _ = run(output, stop_words)
    trims = [0] * (len(groups) - 1) + [trim]
    deltas = [text_of(group, cut) for group, cut in zip(groups, trims, strict=True)]
    whole = [piece for group in groups for piece in group]
    assert "".join(deltas) == text_of(whole, trim)


@settings(checked, max_examples=300)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 131071), st.integers(69, 324), st.sampled_from([330, 1163, 4]))
    ),
    cut=st.integers(0, 20),
    stop_words=st.lists(st.text(min_size=1, max_size=3).map(str.encode), max_size=3),
)
def test_deltas_of_grok_tokens(
    grok: Tokenizer, ids: list[int], cut: int, stop_words: list[bytes]
) -> None:
    """Any ids, byte tokens in any order, and stop words out of their own text."""
    written = b"".join(map(grok.token_bytes, ids))
    stop_words += [written[cut : cut + size] for size in (1, 7) if written[cut:]]
    output = list(map(grok.token_bytes, ids))
    groups, trim, stopped = run(output, stop_words)
    whole = [piece for group in groups for piece in group]
    assert stopped == bool(written[cut:] or naive_stop(output, stop_words))
    deltas = [text_of(group) for group in groups[:-1]]
    deltas.append(text_of(groups[-1], trim))
    assert "".join(deltas) == text_of(whole, trim)


@settings(checked, max_examples=300)
@given(text=st.text())
def test_deltas_of_encoded_text(grok: Tokenizer, text: str) -> None:
    ids = grok.encode(text, continuation=True)
    stream = TextStream(grok.token_bytes)
    sizes = [stream.push(token_id).num_tokens for token_id in ids]
    assert stream.finish().num_tokens == 0, "a whole character was held back"
    deltas, start = [], 0
    for size in sizes:
        deltas.append(grok.decode(ids[start : start + size], continuation=True).decode())
        start += size
    assert "".join(deltas) == text


def push_all(
    output: Sequence[bytes], stop_words: Sequence[bytes], allowed: Callable[[int], bool] = bool
) -> list[tuple[int, bool, int]]:
    stream = TextStream(output.__getitem__, stop_words)
    released = [stream.push(i, stop_allowed=allowed(i + 1)) for i in range(len(output))]
    return [(r.num_tokens, r.stopped, r.text_trim) for r in released]


def test_examples() -> None:
    # A stop word over three tokens; what follows it in its last token is cut too.
    assert push_all([b"so ", b"E", b"N", b"D!"], [b"END"]) == [
        (1, False, 0),
        (0, False, 0),
        (0, False, 0),
        (3, True, 4),
    ]
    # A false start is shown as soon as it is known to be one.
    assert push_all([b"E", b"N", b"E", b"x"], [b"END"])[2:] == [(2, False, 0), (2, False, 0)]
    # Complete first wins, though the other began before it; the longest wins at one end.
    assert push_all([b"xabcd"], [b"abcd", b"bc"]) == [(1, True, 3)]
    assert push_all([b"xabcd"], [b"bc", b"abc", b"c"]) == [(1, True, 4)]
    # One stop word a prefix of another: the longer can never be complete first.
    assert push_all([b"a", b"b"], [b"ab", b"a"])[0] == (1, True, 1)
    # A character in two tokens; control tokens without bytes go along.
    assert push_all([b"\xc3", b"", b"\xa9", b""], []) == [
        (0, False, 0),
        (0, False, 0),
        (3, False, 0),
        (1, False, 0),
    ]
    # A lone continuation byte, an impossible second byte: released at once.
    assert push_all([b"\x80", b"\xe0", b"\x80"], []) == [
        (1, False, 0),
        (0, False, 0),
        (2, False, 0),
    ]


def test_min_tokens() -> None:
    def after_two(num_tokens: int) -> bool:
        return num_tokens > 2

    # Complete too early: ordinary text, released as soon as it cannot begin another stop word.
    assert push_all([b"END", b"x", b"END"], [b"END"], after_two) == [
        (1, False, 0),
        (1, False, 0),
        (1, True, 3),
    ]
    # Begun early, complete in a token that may stop.
    assert push_all([b"x", b"E", b"ND"], [b"END"], after_two)[2] == (2, True, 3)


def test_without_a_tokenizer_every_token_is_a_group() -> None:
    stream = TextStream(None)
    assert [stream.push(token_id) for token_id in (7, 131073)] == [Released(1), Released(1)]
    assert stream.finish() == Released(0)
    with pytest.raises(EngineError, match=r"stop_words is \[b'x'\]: none where .* no tokenizer"):
        TextStream(None, [b"x"])


def test_worst_stop_words_cost_linear_work() -> None:
    """64 words of 1024 bytes that all but match, again and again: no more falls than bytes."""
    matcher = StopMatcher([b"a" * 1023 + bytes([last]) for last in range(64)])
    falls = 0

    class CountedList(list[int]):
        def __getitem__(self, index):
            nonlocal falls
            falls += 1
            return super().__getitem__(index)

    matcher._fallback = CountedList(matcher._fallback)
    text = (b"a" * 1022 + b"b" + b"a" * 3000 + b"c") * 5
    state = 0
    for byte in text:
        state = matcher.step(state, byte)
        assert not matcher.matched[state]
    assert 5 * 1022 < falls <= len(text)


@pytest.mark.parametrize("text_trim", [-1, 3])
def test_impossible_trim_is_refused(text_trim: int) -> None:
    with pytest.raises(EngineError, match=f"text_trim is {text_trim}: 0 to the 2 bytes"):
        text_of([b"ab"], text_trim)


def test_end_in_mid_character() -> None:
    assert text_of([b"a", b"\xe2\x82"]) == "a\ufffd"
    assert text_of([b"a", b"\xe2\x82", b"b"], 1) == "a\ufffd"
