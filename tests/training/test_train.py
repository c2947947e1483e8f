"""What a training run feeds the model, and when."""

from __future__ import annotations

import numpy as np
from training.settings import (
    SEQUENCE_STAGES,
    TOKENS_PER_STEP,
    WARMUP_STEPS,
    rate_factor,
    sequence_length,
)
from training.tokenizer import BOS
from training.train import Batches

STREAM = np.arange(10, 50_010, dtype=np.int32)


def test_an_epoch_has_every_window_once() -> None:
    batches = Batches(STREAM, seed=3)
    seen = [batches.next(128) for _ in range(len(STREAM) // TOKENS_PER_STEP)]
    assert all(batch.shape == (TOKENS_PER_STEP // 128, 129) for batch in seen)
    windows = np.concatenate(seen)
    assert np.all(windows[:, 0] == BOS)
    assert np.all(np.diff(windows[:, 1:], axis=1) == 1)
    assert len(np.unique(windows[:, 1:])) == windows[:, 1:].size


def test_batches_follow_from_the_seed() -> None:
    first, second, other = Batches(STREAM, 3), Batches(STREAM, 3), Batches(STREAM, 4)
    for length in (128, 128, 256):
        batch = first.next(length)
        assert np.array_equal(batch, second.next(length))
        assert not np.array_equal(batch, other.next(length))


def test_rates_rise_stay_and_fall_to_nearly_zero() -> None:
    factors = [rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 1 / WARMUP_STEPS
    assert factors[WARMUP_STEPS] == factors[500] == 1
    assert factors[-1] < 0.01


def test_sequences_grow() -> None:
    lengths = [sequence_length(step, 1000) for step in range(1000)]
    assert lengths == sorted(lengths)
    assert sorted(set(lengths)) == [length for _, length in SEQUENCE_STAGES]
    assert all(TOKENS_PER_STEP % length == 0 for length in lengths)
