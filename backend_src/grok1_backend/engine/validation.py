"""What a request must satisfy to reach the device, beyond what its dataclass checks itself."""

from __future__ import annotations

from collections.abc import Collection

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.engine.requests import GenerationRequest, SamplingParams


def check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Refuses token ids outside the vocabulary.

    Raises:
      EngineError: INVALID_ARG.
    """
    sampling: SamplingParams = request.sampling
    fields: dict[str, Collection[int]] = {
        "prompt": request.prompt,
        "end_ids": sampling.end_ids or (),
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": [token for run in sampling.bad_words for token in run],
    }
    for name, tokens in fields.items():
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < vocab_size:
                raise invalid(f"a token of {name}", token, f"0 to {vocab_size - 1}")


def check_fit(used: int, request: GenerationRequest, limit: int) -> None:
    """Refuses a request that has no room in the context.

    Args:
      used: tokens of its session's history.
      request: to be judged.
      limit: tokens of the context.

    Raises:
      EngineError: INVALID_ARG that names used, asked and limit.
    """
    prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
    if used + prompt + max_tokens > limit:
        held = f"{used} tokens used by the session's earlier turns, " if request.session else ""
        message = (
            f"prompt and max_tokens do not fit the context: {held}{prompt} + {max_tokens} "
            f"(prompt + max_tokens) asked, {limit} is the limit"
        )
        raise EngineError(ErrorCode.INVALID_ARG, message)
