"""The settings of one request, from everything a client may have put them in.

What a tensor says wins over a request parameter, and both over `sampling_parameters`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from grok1_backend.engine.errors import EngineError, invalid
from grok1_backend.triton.interface import ENGINE_SETTINGS, PARAMETERS, Tensors
from grok1_backend.triton.values import (
    from_plain,
    from_tensor,
    to_bool,
    to_float,
    to_int,
    to_list,
    to_object,
    to_text,
)

Settings = dict[str, Any]
"""Values by name: those of the interface, and the JSON's own: logit_bias, allowed_token_ids,
stop_token_ids."""

# Parameters of Triton's own: `id` and `timeout` are what /generate makes of the request's fields.
_TRITON_PARAMETERS = frozenset({"id", "timeout"})

# vLLM's settings that are no settings here: each may be sent with the one value it has.
_FIXED: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


def gather(tensors: Tensors, parameters: Mapping[str, Any]) -> Settings:
    """All settings of a request that were given.

    Raises:
      EngineError: INVALID_ARG for an unknown name or a value of a wrong type.
    """
    settings = _from_parameters(parameters)
    settings |= {
        field.name: from_tensor(field, tensors[field.name])
        for field in ENGINE_SETTINGS
        if field.name in tensors
    }
    return _from_json(settings.pop("sampling_parameters", "{}")) | settings


def _from_parameters(parameters: Mapping[str, Any]) -> Settings:
    settings: Settings = {}
    for name, value in parameters.items():
        if name in PARAMETERS:
            settings[name] = from_plain(PARAMETERS[name], value, where=name)
        elif name not in _TRITON_PARAMETERS and not name.startswith("triton_"):
            raise _unknown(f"the request parameter {name}", value, PARAMETERS, name)
    return settings


def _from_json(text: str) -> Settings:
    try:
        given = to_object("sampling_parameters", json.loads(text))
    except ValueError:
        raise invalid("sampling_parameters", text, "a JSON object") from None
    settings: Settings = {}
    for name, value in given.items():
        where = f"{name} in sampling_parameters"
        if value is None:
            continue  # vLLM's way to say "the default"
        if name in _FIXED:
            if _to_fixed(where, value, _FIXED[name]) != _FIXED[name]:
                raise invalid(where, value, f"{_FIXED[name]} is the only value served")
        elif name in _VLLM:
            settings |= _VLLM[name](where, value)
        elif name in PARAMETERS and name != "sampling_parameters":
            settings[name] = from_plain(PARAMETERS[name], value, where=where)
        else:
            raise _unknown(where, value, {**PARAMETERS, **_VLLM, **_FIXED}, name)
    return settings


def _to_fixed(where: str, value: object, only: object) -> object:
    """The value in the type of the only one that is served."""
    if isinstance(only, bool):
        return to_bool(where, value)
    return to_float(where, value)


def _unknown(where: str, value: object, known: Mapping[str, Any], name: str) -> EngineError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return invalid(where, value, f"there is no such setting{hint}")


def _texts(where: str, value: object) -> tuple[str, ...]:
    return tuple(to_text(where, word) for word in to_list(where, value))


def _token_ids(where: str, value: object) -> tuple[int, ...]:
    return tuple(to_int(where, token_id) for token_id in to_list(where, value))


def _top_k(where: str, value: object) -> Settings:
    top_k = to_int(where, value)
    return {"top_k": 0 if top_k == -1 else top_k}  # vLLM's "all"


def _log_probs(where: str, value: object) -> Settings:
    return {"return_log_probs": True, "return_top_tokens": to_int(where, value)}


def _prompt_log_probs(where: str, value: object) -> Settings:
    to_int(where, value)
    return {"return_prompt_log_probs": True}


def _logit_bias(where: str, value: object) -> Settings:
    biases = to_object(where, value)
    pairs = ((to_int(where, name), to_float(where, bias)) for name, bias in biases.items())
    return {"logit_bias": tuple(pairs)}


# What vLLM names or shapes otherwise than the interface does.
_VLLM: Mapping[str, Callable[[str, object], Settings]] = {
    "stop": lambda where, value: {"stop_words": _texts(where, value)},
    "bad_words": lambda where, value: {"bad_words": _texts(where, value)},
    "stop_token_ids": lambda where, value: {"stop_token_ids": _token_ids(where, value)},
    "allowed_token_ids": lambda where, value: {"allowed_token_ids": _token_ids(where, value)},
    "top_k": _top_k,
    "logprobs": _log_probs,
    "prompt_logprobs": _prompt_log_probs,
    "logit_bias": _logit_bias,
}
