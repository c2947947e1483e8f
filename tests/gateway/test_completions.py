"""`/v1/completions` by the real client: what it says is what the server says."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from gateways import NAME, Gateway
from generation import Response, Stream, text_of, tokens_of
from openai import AsyncOpenAI, OpenAI

from grok1_backend.cli import main
from grok1_backend.text.tokenizer import Tokenizer
from servers import EMBEDDED_MODEL

PROMPTS = (
    "In the beginning",
    " leading spaces\n\nand lines",
    "天地玄黃 宇宙洪荒",
    "emoji 🌍👩\u200d👩\u200d👧 and e\u0301 combining",
    "בראשית ברא אלהים",
)
# Sampled without a filter, a small model writes byte tokens, broken UTF-8 included.
WILD = {"temperature": 4.0, "seed": 11, "max_tokens": 48}


def ask(url: str, prompt: str | list[int], **settings: Any) -> list[Response]:
    """The server's own answer."""
    name = "text_input" if isinstance(prompt, str) else "input_ids"
    with Stream(url) as stream:
        return stream.ask("grok1_generate", **{name: prompt}, **settings)


def streamed(client: OpenAI, **fields: Any) -> list[Any]:
    return list(client.completions.create(model=NAME, stream=True, **fields))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_is_the_servers_whole_and_streamed(
    client: OpenAI, grpc_url: str, prompt: str
) -> None:
    expected = text_of(ask(grpc_url, prompt, **WILD))
    whole = client.completions.create(model=NAME, prompt=prompt, **WILD)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason in ("length", "stop")
    chunks = streamed(client, prompt=prompt, **WILD)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(chunks) > 3
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_has_the_fields_of_the_api(gateway: Gateway) -> None:
    answer = gateway.complete(prompt="In the beginning", max_tokens=3, temperature=0).json
    assert answer["object"] == "text_completion"
    assert answer["model"] == NAME
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_sixteen_tokens_are_the_default(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="And", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_prompts_of_one_request_are_answered_in_order(client: OpenAI, tokenizer: Tokenizer) -> None:
    settings: dict[str, Any] = {"model": NAME, "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=p, **settings).choices[0].text for p in PROMPTS]
    as_texts = client.completions.create(prompt=list(PROMPTS), **settings)
    as_ids = client.completions.create(prompt=[*map(tokenizer.encode, PROMPTS)], **settings)
    for answer in (as_texts, as_ids):
        assert [choice.index for choice in answer.choices] == [*range(len(PROMPTS))]
        assert [choice.text for choice in answer.choices] == alone
    one = client.completions.create(prompt=tokenizer.encode(PROMPTS[0]), **settings)
    assert one.choices[0].text == alone[0]


def test_n_answers_have_seeds_of_their_own(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "prompt": ["In the", "And"], "max_tokens": 6}
    answer = client.completions.create(**settings, n=3, best_of=3, seed=-1)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert len(set(texts)) == 6
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 + 1  # each prompt once
    second = client.completions.create(**settings, seed=0)
    assert [choice.text for choice in second.choices] == [texts[1], texts[4]]
    chunks = streamed(client, prompt=["In the", "And"], max_tokens=6, n=3, seed=-1)
    joined = [""] * 6
    for chunk in chunks:
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == texts


def test_a_stop_text_is_not_shown_nor_its_beginning(client: OpenAI) -> None:
    settings: dict[str, Any] = {"prompt": "In the beginning", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(model=NAME, **settings).choices[0].text
    stop = free[len(free) // 2 :][:5]
    for stops in (stop, ["never so", stop]):
        choice = client.completions.create(model=NAME, stop=stops, **settings).choices[0]
        assert choice.text == free[: free.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = streamed(client, stop=stops, **settings)
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_settings_reach_the_engine(client: OpenAI, tokenizer: Tokenizer) -> None:
    def text(**settings: Any) -> str:
        request = {"model": NAME, "prompt": "In the", "max_tokens": 6, "seed": 1} | settings
        return client.completions.create(**request).choices[0].text

    greedy = text(temperature=0)
    assert text(extra_body={"top_k": 1}) == text(top_p=0) == greedy
    assert text(extra_body={"min_p": 1}) == greedy
    assert text(temperature=2) != greedy
    the = tokenizer.encode(" the", continuation=True)[0]
    assert text(logit_bias={str(the): 1000}) == " the" * 6
    assert text(extra_body={"allowed_token_ids": [the]}) == " the" * 6
    assert text(logit_bias={str(the): 30}, temperature=0, frequency_penalty=90) != " the" * 6
    assert text(logit_bias={str(the): 30}, temperature=0, presence_penalty=90) != " the" * 6
    assert " the" not in text(extra_body={"bad_words": ["the"]}, temperature=0)
    assert text(temperature=0, user="somebody", suffix=None, logprobs=None) == greedy


def test_log_probs_are_the_servers(client: OpenAI, grpc_url: str, tokenizer: Tokenizer) -> None:
    asked = {"return_log_probs": True, "return_top_tokens": 3}
    for prompt, streams in itertools.product(PROMPTS[:3], (False, True)):
        replies = ask(grpc_url, prompt, **WILD, **asked)
        ids = tokens_of(replies)
        parts = [reply.outputs["output_log_probs"][0] for reply in replies]
        if streams:
            choices = [c.choices[0] for c in streamed(client, prompt=prompt, logprobs=3, **WILD)]
        else:
            request = {"model": NAME, "prompt": prompt, "logprobs": 3, **WILD}
            choices = client.completions.create(**request).choices
        found = [choice.logprobs for choice in choices]
        assert [x for part in found for x in part.token_logprobs] == np.concatenate(parts).tolist()
        tokens = [token for part in found for token in part.tokens]
        assert tokens == [name_of(tokenizer.token_bytes(token_id)) for token_id in ids]
        text = "".join(choice.text for choice in choices)
        offsets = [offset for part in found for offset in part.text_offset]
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            if not token.startswith("bytes:"):
                assert text[offset:].startswith(token)
        for part in found:
            for token, log_prob, top in zip(
                part.tokens, part.token_logprobs, part.top_logprobs, strict=True
            ):
                assert top[token] >= log_prob  # of two tokens with one text, the likelier
                assert len(top) <= 4


def name_of(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def test_an_echoed_prompt_is_scored_as_the_score_command_does(
    client: OpenAI, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "In the beginning God created the heaven and the earth. 天"
    ids = tokenizer.encode(text)
    where = ["--checkpoint", EMBEDDED_MODEL / "ckpt-0", "--config", EMBEDDED_MODEL / "config.toml"]
    main(["score", *map(str, where), "--tokens", ",".join(map(str, ids))])
    lines = capsys.readouterr().out.splitlines()[1 : len(ids)]
    expected = [float(line.split("\t")[2]) for line in lines]
    request: dict[str, Any] = {"model": NAME, "echo": True, "max_tokens": 0, "logprobs": 1}
    for prompt in (text, ids):
        choice = client.completions.create(prompt=prompt, **request).choices[0]
        assert choice.text == text
        assert choice.finish_reason == "length"
        log_probs = choice.logprobs
        assert log_probs is not None
        assert log_probs.token_logprobs[0] is None
        assert log_probs.top_logprobs[0] is None
        assert log_probs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        for log_prob, top in zip(
            log_probs.token_logprobs[1:], log_probs.top_logprobs[1:], strict=True
        ):
            assert max(top.values()) >= log_prob
        offsets = log_probs.text_offset
        assert [text[a:b] for a, b in itertools.pairwise(offsets)][:3] == [
            "In",
            " the",
            " beginning",
        ]


def test_an_echo_goes_before_the_answer(client: OpenAI) -> None:
    settings: dict[str, Any] = {"prompt": "In the beginning", "max_tokens": 5, "temperature": 0}
    alone = client.completions.create(model=NAME, logprobs=2, **settings).choices[0]
    choice = client.completions.create(model=NAME, logprobs=2, echo=True, **settings).choices[0]
    assert choice.text == "In the beginning" + alone.text
    assert choice.logprobs is not None
    assert alone.logprobs is not None
    assert len(choice.logprobs.tokens) == 3 + 5
    assert choice.logprobs.token_logprobs[3:] == pytest.approx(
        alone.logprobs.token_logprobs, abs=1e-4
    )
    shift = len("In the beginning")
    assert choice.logprobs.text_offset[3:] == [shift + o for o in alone.logprobs.text_offset]
    chunks = streamed(client, echo=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    nothing = client.completions.create(model=NAME, echo=True, **settings | {"max_tokens": 0})
    assert nothing.choices[0].text == "In the beginning"
    assert nothing.choices[0].logprobs is None


def test_a_stream_tells_its_usage_when_asked(client: OpenAI) -> None:
    request: dict[str, Any] = {"prompt": ["In the", "And"], "max_tokens": 4, "n": 2}
    chunks = streamed(client, stream_options={"include_usage": True}, **request)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 2 + 1
    assert chunks[-1].usage.completion_tokens == 4 * 4
    assert all(chunk.choices for chunk in streamed(client, **request))


def test_a_stream_ends_as_the_api_says(gateway: Gateway) -> None:
    answer = gateway.complete(prompt="And", max_tokens=4, stream=True)
    assert answer.body.endswith("\n\ndata: [DONE]\n\n")


def test_the_model_is_listed(client: OpenAI, gateway: Gateway) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    assert gateway.get("/health").status == 200


def test_many_at_once(gateway: Gateway) -> None:
    """More than there are slots; the gateway answers others meanwhile."""
    prompts = [f"{PROMPTS[0]} {number}" for number in range(40)]
    settings: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0}

    async def text(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **settings)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> tuple[list[str], list[str]]:
        url = f"{gateway.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            streams = asyncio.gather(*(text(client, prompt) for prompt in prompts))
            answered = 0
            while not streams.done():
                await client.models.retrieve(NAME, timeout=5)
                answered += 1
            assert answered > 1
            whole = await client.completions.create(prompt=prompts, **settings)
        return await streams, [choice.text for choice in whole.choices]

    one_by_one, together = asyncio.run(ask_all())
    assert one_by_one == together
