"""`/v1/chat/completions`: with the operator's template, and not without one."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateways import NAME, Gateway, launch
from openai import OpenAI

from grok1_backend.text.tokenizer import Tokenizer

MESSAGES: list[Any] = [
    {"role": "user", "content": "In the"},
    {"role": "assistant", "content": "beginning"},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "it"}]},
]
PROMPT = "user: In the\nassistant: beginning\nuser: And it\nassistant:"  # by conftest's template


def test_an_answer_is_that_to_the_templates_prompt(client: OpenAI, tokenizer: Tokenizer) -> None:
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
    chat = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    assert chat.object == "chat.completion"
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokenizer.encode(PROMPT))


def test_it_streams(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": 3, "max_tokens": 12}
    whole = client.chat.completions.create(**settings, n=2)
    chunks = list(
        client.chat.completions.create(
            **settings, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [c.choices[0] for c in parts if c.choices[0].index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        text = "".join(c.delta.content or "" for c in mine)
        assert text == whole.choices[index].message.content
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
    assert last.usage == whole.usage


def test_log_probs(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    log_probs = chat.choices[0].logprobs
    assert log_probs is not None
    tokens = log_probs.content or []
    assert len(tokens) == 6
    text = b"".join(bytes(token.bytes or []) for token in tokens)
    assert text.decode() == chat.choices[0].message.content
    for token in tokens:  # greedy: the best one
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
    bare = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True
    )
    assert bare.choices[0].logprobs is not None
    assert [t.top_logprobs for t in bare.choices[0].logprobs.content or []] == [[]] * 6


def test_what_is_refused(client: OpenAI, gateway: Gateway) -> None:
    def refusal(**fields: Any) -> str:
        body = {"model": NAME, "messages": MESSAGES} | fields
        answer = gateway.post("/v1/chat/completions", body)
        assert answer.status == 400
        message: str = answer.json["error"]["message"]
        return message

    assert "messages is []: list should have at least 1 item" in refusal(messages=[])
    assert "messages.0.content is missing" in refusal(messages=[{"role": "user"}])
    assert "the chat template refuses the messages: there is no role x" in refusal(
        messages=[{"role": "x", "content": ""}]
    )
    assert "top_logprobs need logprobs to be true" in refusal(top_logprobs=2)
    assert "tools is []: there is no such field" in refusal(tools=[])
    with pytest.raises(openai.NotFoundError, match="no model 'x'"):
        client.chat.completions.create(model="x", messages=MESSAGES)


def test_there_is_none_without_a_template(grpc_url: str) -> None:
    with launch(grpc_url, "--model-name", "base") as gateway:
        answer = gateway.post("/v1/chat/completions", {"model": "base", "messages": MESSAGES})
    assert answer.status == 404
    assert "without a chat template" in answer.json["error"]["message"]
