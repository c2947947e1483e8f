"""Events of the engine as outputs."""

from __future__ import annotations

import numpy as np

from grok1_backend.engine.requests import TOP_TOKENS, FinishReason, TokenEvent
from grok1_backend.triton.interface import ERROR, GROK1, NUMPY, Tensors, as_tensor
from grok1_backend.triton.outputs import event_values, merge


def event(ids: tuple[int, ...], so_far: int, **more: object) -> TokenEvent:
    count = len(ids)
    return TokenEvent(
        request_id="r",
        token_ids=ids,
        log_probs=-np.array(ids, np.float32),
        top_ids=np.tile(np.arange(TOP_TOKENS, dtype=np.int32), (count, 1)),
        top_log_probs=np.full((count, TOP_TOKENS), -1, np.float32),
        num_input_tokens=4,
        num_output_tokens=so_far,
        **more,  # type: ignore[arg-type]
    )


def event_tensors(happened: TokenEvent, **wanted: object) -> Tensors:
    values = event_values(happened, **wanted)  # type: ignore[arg-type]
    return {name: as_tensor(name, value) for name, value in values.items()}


def test_every_output_has_the_type_and_dims_of_the_table() -> None:
    tensors = event_tensors(event((5, 6), 2), log_probs=True, top_tokens=3)
    fields = {field.name: field for field in GROK1.outputs if field is not ERROR}
    assert set(tensors) == set(fields)
    for name, array in tensors.items():
        assert array.dtype == NUMPY[fields[name].data_type], name
        assert array.shape[0] == 1, name
        dims = fields[name].dims
        assert len(array.shape) == 1 + len(dims), name
        assert all(want in (-1, have) for want, have in zip(dims, array.shape[1:], strict=True))


def test_only_what_was_asked_for_is_filled() -> None:
    tensors = event_tensors(event((5, 6), 2))
    for name in ("output_log_probs", "top_token_ids", "top_log_probs", "prompt_log_probs"):
        assert tensors[name].size == 0, name
    tensors = event_tensors(event((5, 6), 2), log_probs=True, top_tokens=2)
    assert tensors["output_log_probs"].tolist() == [[-5.0, -6.0]]
    assert tensors["top_token_ids"][0].tolist() == [[0, 1] + [-1] * 6] * 2
    assert tensors["top_log_probs"][0].tolist() == [[-1.0] * 2 + [0.0] * 6] * 2


def test_the_prompt_goes_with_the_first_response() -> None:
    assert event_tensors(event((5,), 1), prompt_text="p")["prompt_text"].item() == b"p"
    assert event_tensors(event((5,), 2), prompt_text="p")["prompt_text"].item() == b""


def test_merged_responses_say_what_they_said_one_by_one() -> None:
    prompt = np.array([0, -1], np.float32)
    events = [
        event((5,), 1, prompt_log_probs=prompt),
        event((6, 7), 3),
        event((), 3, finish_reason=FinishReason.LENGTH, cum_log_prob=-18.0, text_trim=2),
    ]
    merged = merge([event_values(one, log_probs=True, prompt_text="p") for one in events])
    assert merged["token_ids"] == (5, 6, 7)
    assert merged["output_log_probs"].tolist() == [[-5, -6, -7]]
    assert (merged["top_token_ids"], merged["top_log_probs"]) == ((), ())
    assert merged["prompt_log_probs"].tolist() == [[0, -1]]
    assert merged["prompt_text"] == "p"
    assert [merged[name] for name in ("num_output_tokens", "cum_log_probs", "text_trim")] == [
        *(3, -18.0, 2),
    ]
    assert merged["finish_reason"] == "length"
    merged = merge([event_values(one, top_tokens=2) for one in events])
    assert merged["top_token_ids"].shape == merged["top_log_probs"].shape == (1, 3, TOP_TOKENS)
