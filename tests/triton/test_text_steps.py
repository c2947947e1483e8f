"""Text to token ids and token ids to text, as the text models do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.triton.interface import PROMPT_TEXT, TEXT_TRIM, TOKEN_IDS
from grok1_backend.triton.parsing import ClientRequest
from grok1_backend.triton.text_steps import Prompt, read_prompt, response_texts

TOKENIZER = Tokenizer(Path(__file__).resolve().parents[2] / "embedded_model" / "tokenizer.model")
TEXT = "In the beginning 天地 🌍 שלום\n"


def text_input(text: bytes) -> dict[str, Any]:
    return {"text_input": np.array([[text]], dtype=object)}


def reply(ids: list[int], trim: int = 0, prompt: str = "") -> dict[str, Any]:
    return {
        TOKEN_IDS.name: TOKEN_IDS.tensor(np.array(ids, np.int32)),
        TEXT_TRIM.name: TEXT_TRIM.tensor(trim),
        PROMPT_TEXT.name: PROMPT_TEXT.tensor(prompt),
    }


def test_a_prompt_as_text_or_as_ids_is_the_same() -> None:
    ids = TOKENIZER.encode(TEXT)
    expected = Prompt(ids, TEXT)
    assert read_prompt(TOKENIZER, ClientRequest(tensors=text_input(TEXT.encode()))) == expected
    as_ids = {"input_ids": np.array([ids], np.int32)}
    assert read_prompt(TOKENIZER, ClientRequest(tensors=as_ids)) == expected


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "one of text_input and input_ids"),
        (text_input(b"x") | {"input_ids": np.array([[5]], np.int32)}, "one of text_input and"),
        (text_input(b""), "text_input is '': not empty"),
        (text_input(b"ab\xff"), "UTF-8, which it is not at byte 2"),
        ({"input_ids": np.array([[10**6]], np.int32)}, "token id is 1000000"),
    ],
)
def test_what_is_no_prompt(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        read_prompt(TOKENIZER, ClientRequest(tensors=tensors))


def test_text_of_responses() -> None:
    ids = TOKENIZER.encode(TEXT)
    assert response_texts(TOKENIZER, reply(ids)) == [TEXT]
    assert response_texts(TOKENIZER, reply(ids, trim=1, prompt="é")) == ["é" + TEXT[:-1]]
    assert response_texts(TOKENIZER, reply([])) == [""]
    two = [reply(ids), reply(ids[::-1], prompt="p")]
    batch = {name: np.concatenate([one[name] for one in two]) for name in two[0]}
    assert response_texts(TOKENIZER, batch) == [
        TEXT,
        "p" + TOKENIZER.decode(ids[::-1], continuation=True).decode(errors="replace"),
    ]


def test_a_response_without_its_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match="text_trim"):
        response_texts(TOKENIZER, {TOKEN_IDS.name: TOKEN_IDS.tensor([1])})
