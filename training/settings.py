"""The numbers that, with the packages' text and the number of steps, define the embedded model."""

from __future__ import annotations

from grok1_backend.model.config import GrokConfig, load_config
from training.tokenizer import VOCAB_SIZE

SEED = 1
TOKENS_PER_STEP = 4096
DEVICES = 2  # host devices that share a step, one core each: fewer waits than threads in one
# (share of the steps, sequence length): attention over short sequences is cheaper, and most of
# what two cores can learn in an hour lies within 128 tokens.
SEQUENCE_STAGES = ((0.5, 128), (0.35, 256), (0.12, 512), (0.03, 1024))
WARMUP_STEPS = 50
COOLDOWN_SHARE = 0.4  # of the steps, at the end: the rates fall to zero in a line
MUON_RATE = 0.02
ADAM_RATE = 0.003
WEIGHT_DECAY = 0.05


def model_config() -> GrokConfig:
    """The published configuration of the embedded model."""
    config = load_config("grok1-embedded")
    if config.vocab_size != VOCAB_SIZE:
        raise ValueError(f"vocab_size is {config.vocab_size}: the tokenizer has {VOCAB_SIZE}")
    return config


def sequence_length(step: int, steps: int) -> int:
    """The length of the training sequences at a step (from 0) of `steps`."""
    end = 0.0
    for share, length in SEQUENCE_STAGES:
        end += share * steps
        if step < end:
            return length
    return SEQUENCE_STAGES[-1][1]


def rate_factor(step: int, steps: int) -> float:
    """What multiplies the rates at a step: up from 0, constant, then down to 0."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return min(warmup, (steps - step) / (COOLDOWN_SHARE * steps))
