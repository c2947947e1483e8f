"""Sequences: turns of one correlation id continue one text."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from generation import Response, Stream, text_of, tokens_of
from tritonclient.utils import InferenceServerException

from grok1_backend.text.tokenizer import Tokenizer

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
TURNS = ("In the beginning", "\nAnd the king said", "\nBlessed are")


def turn(stream: Stream, key: int | str, number: int, of: int, **inputs: Any) -> list[Response]:
    flags = {"sequence_start": number == 0, "sequence_end": number == of - 1}
    model = "grok1" if "input_ids" in inputs else "grok1_ensemble"
    return stream.ask(model, options={"sequence_id": key, **flags}, **inputs, **GREEDY)


@pytest.fixture
def tokenizer(server: Any) -> Tokenizer:
    return Tokenizer(server.options.model / "tokenizer.model")


@pytest.mark.parametrize("key", [4711, "c8ef4e07-5c0e-4b5b-9a0f-6f3a1d0a3c55"])
def test_three_turns_are_one_prompt_with_their_outputs_in_it(
    grpc_url: str, tokenizer: Tokenizer, key: int | str
) -> None:
    history: list[int] = []
    with Stream(grpc_url) as stream:
        for number, text in enumerate(TURNS):
            ids = tokenizer.encode(text, continuation=number > 0)
            responses = turn(stream, key, number, 3, text_input=text)
            history += ids
            assert responses[-1].value("num_input_tokens") == len(history)
            # What one prompt of all that came before would be continued with.
            joined = turn(stream, str(uuid.uuid4()), 0, 1, input_ids=history)
            assert tokens_of(responses) == tokens_of(joined), f"turn {number + 1}"
            assert text_of(responses) == tokenizer.decode(tokens_of(responses)).decode(
                errors="replace"
            )
            history += tokens_of(responses)


def test_start_on_an_open_sequence_begins_anew(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        first = turn(stream, "anew", 0, 9, text_input=TURNS[0])
        turn(stream, "anew", 1, 9, text_input=TURNS[1])
        again = turn(stream, "anew", 0, 1, text_input=TURNS[0])
    assert text_of(again) == text_of(first)


def test_end_closes_a_sequence(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        turn(stream, 88, 0, 2, text_input=TURNS[0])
        turn(stream, 88, 1, 2, text_input=TURNS[1])
        with pytest.raises(InferenceServerException, match="START"):
            turn(stream, 88, 1, 3, text_input=TURNS[2])


def test_a_sequence_needs_start_and_a_correlation_id(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        with pytest.raises(InferenceServerException, match="START flag on the first request"):
            turn(stream, 89, 1, 3, text_input=TURNS[0])
        with pytest.raises(InferenceServerException, match="correlation ID"):
            stream.ask("grok1_ensemble", text_input=TURNS[0])


def test_turns_sent_without_waiting_are_served_in_order(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        waited = [turn(stream, "waits", n, 3, text_input=text) for n, text in enumerate(TURNS)]
        for number, text in enumerate(TURNS):
            options = {
                "sequence_id": "hurries",
                "sequence_start": number == 0,
                "sequence_end": number == 2,
                "request_id": str(number),
            }
            stream.send("grok1_ensemble", options=options, text_input=text, **GREEDY)
        received = stream.collect(3)
    assert list(received) == ["0", "1", "2"]
    assert [text_of(received[str(n)]) for n in range(3)] == [text_of(r) for r in waited]


def test_a_turn_that_does_not_fit_is_refused_and_the_sequence_goes_on(grpc_url: str) -> None:
    with Stream(grpc_url) as stream:
        turn(stream, "full", 0, 3, input_ids=[5, 6, 7])
        with pytest.raises(InferenceServerException, match="8192"):
            turn(stream, "full", 1, 3, input_ids=[5] * 8190)
        assert len(tokens_of(turn(stream, "full", 2, 3, input_ids=[8]))) == GREEDY["max_tokens"]
