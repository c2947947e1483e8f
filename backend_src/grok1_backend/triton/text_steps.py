"""What the text models do before and after the engine: text to token ids, token ids to text.

Stateless: a response holds all that its own text is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from grok1_backend.engine.errors import invalid
from grok1_backend.text.stream import group_text
from grok1_backend.text.tokenizer import Tokenizer
from grok1_backend.triton.interface import (
    INPUT_IDS,
    PROMPT_TEXT,
    PROMPTS,
    TEXT_INPUT,
    TEXT_TRIM,
    TOKEN_IDS,
    Tensors,
    Values,
)
from grok1_backend.triton.parsing import ClientRequest
from grok1_backend.triton.values import from_tensor

NEEDED = (TOKEN_IDS, TEXT_TRIM, PROMPT_TEXT)
"""The outputs of `grok1` that text is made of."""


@dataclass(frozen=True)
class Prompt:
    """A prompt in both forms."""

    ids: list[int]
    text: str


def read_prompt(tokenizer: Tokenizer, client: ClientRequest) -> Prompt:
    """The prompt of a request that has it as text or as ids.

    Raises:
      EngineError: INVALID_ARG unless exactly one of them is there, and it is not empty.
    """
    given = [field for field in PROMPTS if field.name in client.tensors]
    if len(given) != 1:
        names = [field.name for field in given]
        raise invalid("the prompt", names, f"one of {TEXT_INPUT.name} and {INPUT_IDS.name}")
    value = from_tensor(given[0], client.tensors[given[0].name])
    if not value:
        raise invalid(given[0].name, value, "not empty")
    if given[0] is TEXT_INPUT:
        return Prompt(tokenizer.encode(value, continuation=client.continues), value)
    text = tokenizer.decode(value, continuation=client.continues)
    return Prompt(list(value), text.decode(errors="replace"))


def response_text(tokenizer: Tokenizer, reply: Values) -> str:
    """The text of one response of `grok1`.

    Args:
      tokenizer: of the model.
      reply: plain values of `NEEDED`, and perhaps of others.

    Raises:
      EngineError: INVALID_ARG if they are not what `grok1` sends.
    """
    text = group_text(tokenizer.token_bytes, reply[TOKEN_IDS.name], reply[TEXT_TRIM.name])
    prompt: str = reply[PROMPT_TEXT.name]
    return prompt + text


def response_texts(tokenizer: Tokenizer, tensors: Tensors) -> list[str]:
    """The texts of a batch of responses of `grok1`.

    Args:
      tokenizer: of the model.
      tensors: `NEEDED`, [n, ...] for n responses.

    Raises:
      EngineError: INVALID_ARG if one of them is missing, or not what `grok1` sends.
    """
    for field in NEEDED:
        if field.name not in tensors:
            raise invalid(field.name, None, "needed to make text of tokens")
    return [
        response_text(
            tokenizer,
            {field.name: from_tensor(field, tensors[field.name][row]) for field in NEEDED},
        )
        for row in range(len(tensors[TOKEN_IDS.name]))
    ]
