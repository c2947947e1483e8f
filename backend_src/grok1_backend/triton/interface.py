"""The inputs and outputs of the six models: the one table that everything else reads.

Requests are parsed by it, the models' configs are completed from it, the fronts build their calls
of `grok1` from it, and docs/interface.md is printed from it. Names follow tensorrtllm_backend and
vllm_backend. Dims are those of one prompt: all models are batched, so tensors have one more in
front.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grok1_backend.engine.requests import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_WORD_BYTES,
    MAX_STOP_WORDS,
    TOP_TOKENS,
)

Tensors = dict[str, NDArray[np.generic]]
"""Tensors of one prompt by name, the batch dimension (1) in front; strings are bytes objects."""

Values = dict[str, Any]
"""Outputs of one prompt by name, as plain values or as tensors; `()` is a list without rows."""

NUMPY = {
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_STRING": np.object_,
}


@dataclass(frozen=True)
class Output:
    """A tensor that a model sends."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    meaning: str
    optional: bool = field(default=False, kw_only=True)
    """Whether responses come without it where nothing was asked for."""

    def tensor(self, value: object) -> NDArray[np.generic]:
        """The value of one prompt as a tensor: batch dimension in front, text as UTF-8."""
        if isinstance(value, str):
            value = value.encode()
        array: NDArray[np.generic] = np.asarray(value, dtype=NUMPY[self.data_type])
        shape = array.shape if array.size else (0, *self.dims[1:])
        return array.reshape(1, *(shape or (1,)))


@dataclass(frozen=True)
class Input(Output):
    """A tensor that a model takes; all are optional for Triton."""

    default: str = ""
    limit: str = ""
    bounds: tuple[float, float] | None = None
    """The least and the greatest value, where the limit is a range."""

    @property
    def scalar(self) -> bool:
        """Whether it is one value, which may also come as a request parameter."""
        return self.dims == (1,)


def _setting(name: str, kind: str, meaning: str, default: str, low: float, high: float) -> Input:
    return Input(
        name, kind, (1,), meaning, default, f"{_number(low)} to {_number(high)}", (low, high)
    )


def _number(value: float) -> str:
    power = int(value).bit_length()
    if value == 2 ** (power - 1) and power > 20:
        return f"2^{power - 1}"
    if value == 2**power - 1 and power > 20:
        return f"2^{power} - 1"
    return "-2^31" if value == -(2**31) else f"{value:g}"


INT_MAX = 2**31 - 1
MAX_DRAIN_SECONDS = 3600

TEXT_INPUT = Input(
    "text_input",
    "TYPE_STRING",
    (1,),
    "The prompt as text. Either this or `input_ids`.",
    limit="UTF-8, not empty",
)
INPUT_IDS = Input(
    "input_ids",
    "TYPE_INT32",
    (-1,),
    "The prompt as token ids, in place of `text_input`.",
    limit="ids of the vocabulary, at least one",
)
EXCLUDE_INPUT = Input(
    "exclude_input_in_output",
    "TYPE_BOOL",
    (1,),
    "False puts the prompt's text before the output's, in the first response.",
    "true",
    "true or false",
)
STREAM = Input(
    "stream",
    "TYPE_BOOL",
    (1,),
    "True sends a response for each group of tokens, False a single one at the end. "
    "`grok1_complete` always answers once and takes false only.",
    "true",
    "true or false",
)

ENGINE_SETTINGS = (
    Input(
        "sampling_parameters",
        "TYPE_STRING",
        (1,),
        "A JSON object of settings in vLLM's names, numbers or numeric strings. A setting with a "
        "tensor or request parameter of its own is taken from there.",
        "{}",
        "a JSON object of known names",
    ),
    _setting(
        "max_tokens",
        "TYPE_INT32",
        "The most tokens to generate.",
        "128, or as configured",
        0,
        INT_MAX,
    ),
    _setting(
        "min_tokens",
        "TYPE_INT32",
        "No end id and no stop word ends the output before this many.",
        "0",
        0,
        INT_MAX,
    ),
    _setting("temperature", "TYPE_FP32", "0 always takes the most likely token.", "1", 0, 100),
    _setting("top_k", "TYPE_INT32", "Keep the k most likely tokens; 0 keeps all.", "0", 0, INT_MAX),
    _setting(
        "top_p",
        "TYPE_FP32",
        "Keep the smallest set of tokens whose probability reaches this.",
        "1",
        0,
        1,
    ),
    _setting(
        "min_p",
        "TYPE_FP32",
        "Keep tokens at least this many times as likely as the likeliest.",
        "0",
        0,
        1,
    ),
    _setting(
        "repetition_penalty",
        "TYPE_FP32",
        "Divides positive and multiplies negative logits of tokens in prompt or output.",
        "1",
        0.01,
        100,
    ),
    _setting(
        "presence_penalty",
        "TYPE_FP32",
        "Taken once from the logit of each token in the output.",
        "0",
        -100,
        100,
    ),
    _setting(
        "frequency_penalty",
        "TYPE_FP32",
        "Taken from a token's logit for each time it is in the output.",
        "0",
        -100,
        100,
    ),
    Input(
        "seed",
        "TYPE_UINT64",
        (1,),
        "The same seed gives the same tokens, whatever else the server does.",
        "drawn anew",
        "0 to 2^64 - 1",
    ),
    Input(
        "stop_words",
        "TYPE_STRING",
        (-1,),
        "Texts that end the output; they are not part of it.",
        "none",
        f"at most {MAX_STOP_WORDS} of 1 to {MAX_STOP_WORD_BYTES} bytes of UTF-8",
    ),
    Input(
        "bad_words",
        "TYPE_STRING",
        (-1,),
        "Words that are not to be written, with and without a space before. Empty ones are "
        "skipped.",
        "none",
        f"together at most {MAX_BAD_WORDS} token runs of at most {MAX_BAD_WORD_TOKENS} tokens",
    ),
    Input(
        "embedding_bias_words",
        "TYPE_STRING",
        (-1,),
        "Words whose tokens are made more or less likely.",
        "none",
        f"together at most {MAX_LOGIT_BIAS} tokens",
    ),
    Input(
        "embedding_bias_weights",
        "TYPE_FP32",
        (-1,),
        "What is added to the logits of the tokens of each of `embedding_bias_words`.",
        "none",
        "one for each word, -10000 to 10000",
    ),
    Input(
        "end_id",
        "TYPE_INT32",
        (1,),
        "The token id that ends the output.",
        "the model's",
        "an id of the vocabulary",
    ),
    Input(
        "ignore_eos",
        "TYPE_BOOL",
        (1,),
        "True does not end the output at an end id.",
        "false",
        "true or false",
    ),
    Input(
        "return_log_probs",
        "TYPE_BOOL",
        (1,),
        "Whether `output_log_probs` is filled.",
        "false",
        "true or false",
    ),
    _setting(
        "return_top_tokens",
        "TYPE_INT32",
        "How many columns of `top_token_ids` and `top_log_probs` are filled.",
        "0",
        0,
        TOP_TOKENS,
    ),
    Input(
        "return_prompt_log_probs",
        "TYPE_BOOL",
        (1,),
        "Whether `prompt_log_probs`, `prompt_top_ids` and `prompt_top_log_probs` are filled; "
        "`max_tokens` may be 0 then.",
        "false",
        "true or false",
    ),
    _setting(
        "priority",
        "TYPE_INT32",
        "Higher is served first.",
        "0",
        -(2**31),
        INT_MAX,
    ),
    STREAM,
    EXCLUDE_INPUT,
)
PROMPT_TEXT = Input(
    "prompt_text",
    "TYPE_STRING",
    (1,),
    "The prompt as text: `grok1` hands it on with its first response if `exclude_input_in_output` "
    "is false. An ensemble can take it to no step behind a decoupled model by another way.",
    limit="UTF-8",
)

INTERNAL = Input(
    "internal",
    "TYPE_STRING",
    (1,),
    "Sent by models that call this one: where the caller listens, `/`, the call's number. What is "
    "generated goes to the caller's socket. There are two responses: an empty one, or the output "
    "`error`, as soon as the request is taken in, and an empty one at its end. Only `abort` "
    "cancels.",
)
ABORT = Input(
    "abort",
    "TYPE_STRING",
    (1,),
    "The id of a request to cancel; every other input is ignored. Sent with START and END under a "
    "correlation id of its own. An unknown id is no error.",
)
DRAIN = Input(
    "drain",
    "TYPE_FP32",
    (1,),
    "Takes no more requests in; what still runs after so many seconds ends with UNAVAILABLE. "
    "Answers when the engine is empty. Sent as `abort` is.",
    limit=f"0 to {MAX_DRAIN_SECONDS}",
)

TOKEN_IDS = Output("token_ids", "TYPE_INT32", (-1,), "The tokens of this response.")
TEXT_TRIM = Output(
    "text_trim",
    "TYPE_INT32",
    (1,),
    "How many bytes at the end of the tokens' text are not part of the output (a stop word).",
)
TEXT_OUTPUT = Output(
    "text_output",
    "TYPE_STRING",
    (1,),
    "The text of this response. The texts of all responses, joined, are that of a single one.",
)
FINISH_REASON = Output(
    "finish_reason",
    "TYPE_STRING",
    (1,),
    "`stop` (end id or stop word) or `length`; empty while more is to come.",
)
TOKEN_OUTPUTS = (
    FINISH_REASON,
    TOKEN_IDS,
    Output(
        "output_log_probs",
        "TYPE_FP32",
        (-1,),
        "Of each of the tokens, before temperature; left out unless asked for.",
        optional=True,
    ),
    Output("cum_log_probs", "TYPE_FP32", (1,), "The sum of the log-probs of all tokens so far."),
    Output(
        "top_token_ids",
        "TYPE_INT32",
        (-1, TOP_TOKENS),
        "The most likely tokens at each of the tokens; -1 in the columns past "
        "`return_top_tokens`; left out where that is 0.",
        optional=True,
    ),
    Output(
        "top_log_probs",
        "TYPE_FP32",
        (-1, TOP_TOKENS),
        "Their log-probs; 0 in the columns that are not filled. As above.",
        optional=True,
    ),
    Output(
        "prompt_log_probs",
        "TYPE_FP32",
        (-1,),
        "Of each prompt token given those before it; the first is 0. In the first response, if "
        "asked for; else left out.",
        optional=True,
    ),
    Output(
        "prompt_top_ids",
        "TYPE_INT32",
        (-1, TOP_TOKENS),
        "The most likely tokens at each prompt position; the first row is -1. As above.",
        optional=True,
    ),
    Output(
        "prompt_top_log_probs",
        "TYPE_FP32",
        (-1, TOP_TOKENS),
        "Their log-probs; the first row is 0. As above.",
        optional=True,
    ),
    Output(
        "num_input_tokens",
        "TYPE_INT32",
        (1,),
        "Tokens of the prompt, the earlier turns of the sequence included.",
    ),
    Output("num_output_tokens", "TYPE_INT32", (1,), "Tokens so far, these included."),
    Output(
        "request_id",
        "TYPE_STRING",
        (1,),
        "The engine's name for the request: the client's request id, or one made up.",
    ),
)
ERROR = Output(
    "error",
    "TYPE_STRING",
    (2,),
    "Code and message of why an `internal` request was refused; in no other response.",
)
PROMPT_IDS = Output("prompt_ids", "TYPE_INT32", (-1,), "The prompt as token ids.")

PROMPTS = (TEXT_INPUT, INPUT_IDS)


@dataclass(frozen=True)
class Model:
    """What one model of the repository takes and sends."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    max_batch_size: int = 1
    decoupled: bool = False


def _as_input(output: Output) -> Input:
    return Input(output.name, output.data_type, output.dims, output.meaning)


TEXT_INPUTS = (*PROMPTS, *ENGINE_SETTINGS)
TEXT_OUTPUTS = (TEXT_OUTPUT, *TOKEN_OUTPUTS)

GROK1 = Model(
    "grok1",
    (INPUT_IDS, PROMPT_TEXT, *ENGINE_SETTINGS, INTERNAL, ABORT, DRAIN),
    (*TOKEN_OUTPUTS, TEXT_TRIM, PROMPT_TEXT, ERROR),
    decoupled=True,
)
PREPROCESS = Model("grok1_preprocess", PROMPTS, (PROMPT_IDS, PROMPT_TEXT))
POSTPROCESS = Model(
    "grok1_postprocess",
    (*map(_as_input, (TOKEN_IDS, TEXT_TRIM)), PROMPT_TEXT),
    (TEXT_OUTPUT,),
    max_batch_size=64,
)
ENSEMBLE = Model("grok1_ensemble", TEXT_INPUTS, TEXT_OUTPUTS, decoupled=True)
GENERATE = Model("grok1_generate", TEXT_INPUTS, TEXT_OUTPUTS, decoupled=True)
COMPLETE = Model("grok1_complete", TEXT_INPUTS, TEXT_OUTPUTS, max_batch_size=64)
MODELS = {
    model.name: model for model in (GROK1, PREPROCESS, POSTPROCESS, ENSEMBLE, GENERATE, COMPLETE)
}

OUTPUTS = {field.name: field for model in MODELS.values() for field in model.outputs}


def as_tensor(name: str, value: Any) -> NDArray[np.generic]:
    """An output's value as a tensor; one that is a tensor already stays as it is."""
    if isinstance(value, np.ndarray):
        return value
    return OUTPUTS[name].tensor(value)


def left_out(name: str, value: Any) -> bool:
    """Whether an output's value is one that responses come without."""
    return isinstance(value, tuple) and not value and OUTPUTS[name].optional


PARAMETERS = {field.name: field for field in ENGINE_SETTINGS if field.scalar}
"""The settings that may come as request parameters."""
