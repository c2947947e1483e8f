"""Every token of a text is counted once, with what stands before it in view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training.evaluation import BATCH, STRIDE, WINDOW, bits_of_stream
from training.tokenizer import BOS, Tokens


class Recorder:
    """A scorer that says of each token how often it was scored, and remembers its context."""

    def __init__(self) -> None:
        self.contexts: dict[int, int] = {}

    def bits(self, params: Any, windows: Tokens) -> np.ndarray[Any, Any]:
        assert params == {}
        assert windows.shape == (BATCH, WINDOW + 1)
        for row in windows:
            assert row[0] == BOS or not row.any()
            for place, token in enumerate(row[1:].tolist()):
                self.contexts[token] = max(place, self.contexts.get(token, 0))
        return np.ones((BATCH, WINDOW), np.float32)


@pytest.mark.parametrize(
    "length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + STRIDE, BATCH * STRIDE + 700, 9000]
)
def test_every_token_is_counted_once(length: int) -> None:
    tokens = np.arange(10, 10 + length, dtype=np.int32)
    recorder = Recorder()
    bits = bits_of_stream(recorder, {}, np.concatenate([np.array([BOS], np.int32), tokens]))  # type: ignore[arg-type]
    assert bits == length
    for token in tokens.tolist():
        assert recorder.contexts[token] >= min(token - 10, WINDOW - STRIDE)
