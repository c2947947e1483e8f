"""The model that engines are compared with: its sizes, random weights, and directories of it.

4 layers, width 1024, 8 experts of which 2 are used, vocabulary 32768: 314.6 million parameters,
111.7 million of them used by a token. The int8 and the float32 directory hold the same numbers,
so that every engine that is given them computes the same model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from sentencepiece import SentencePieceTrainer

from grok1_backend.checkpoint.released import save_parameters
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import leaves
from grok1_backend.model.quantization import QuantizedWeight8bit
from grok1_backend.text.tokenizer import TOKENIZER_FILE

CONFIG = GrokConfig(
    vocab_size=32768,
    sequence_len=8192,
    emb_size=1024,
    num_layers=4,
    num_q_heads=16,
    num_kv_heads=4,
    key_size=64,
    widening_factor=4.03,
    num_experts=8,
    num_selected_experts=2,
    embedding_multiplier_scale=32.0,
    output_multiplier_scale=0.577,
    attn_output_multiplier=0.125,
)
RUNNER = RunnerSettings(
    num_slots=32,
    num_pages=1024,
    prefill_tokens=(64, 128, 512),
    prefill_rows=(1, 8),
    decode_rows=(1, 8, 32),
)
WEIGHTS = ("int8", "float32")


def random_leaves(weights: str) -> dict[str, Any]:
    """Every tensor of the checkpoint under its name, the same numbers in each kind of weights."""
    rng = np.random.default_rng(0)
    named: dict[str, Any] = {}
    for leaf in leaves(CONFIG):
        scale = np.float32(leaf.shape[-2] ** -0.5) if len(leaf.shape) > 1 else np.float32(1)
        if leaf.quantized:
            weight = rng.integers(-127, 128, leaf.shape, np.int8)
            scales = np.full((*leaf.shape[:-2], 1, leaf.shape[-1]), scale / 64, jnp.bfloat16)
            if weights == "int8":
                named[leaf.name] = QuantizedWeight8bit(weight, scales)
            else:
                named[leaf.name] = weight * scales.astype(np.float32)
        else:
            named[leaf.name] = rng.standard_normal(leaf.shape, np.float32) * scale
    return named


def write_model(directory: Path, weights: str, runner: RunnerSettings = RUNNER) -> Path:
    """Makes a model directory that any of our commands serves; weights that are there are kept.

    Args:
      directory: where.
      weights: one of `WEIGHTS`.
      runner: what goes into the `[runner]` table.

    Returns:
      `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "ckpt-0").exists():
        save_parameters(directory / "ckpt-0", random_leaves(weights))
    write_tokenizer(directory / TOKENIZER_FILE)
    tables = _table("model", CONFIG) + _table("runner", runner)
    (directory / "config.toml").write_text(tables, encoding="utf-8")
    return directory


def write_tokenizer(path: Path) -> None:
    """A tokenizer of as many pieces, most of them the words t0, t1, t2, ..."""
    pieces = 4 + 256 + 16  # special ones, bytes, and some that training finds
    SentencePieceTrainer.train(
        sentence_iterator=iter(["in the beginning"] * 4),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=CONFIG.vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=[f" t{i}" for i in range(CONFIG.vocab_size - pieces)],
        minloglevel=2,
        pad_id=CONFIG.pad_token,
        bos_id=CONFIG.bos_token,
        eos_id=CONFIG.eos_token,
        unk_id=3,
    )
    path.with_suffix(".vocab").unlink()


def _table(name: str, settings: Any) -> str:
    """A TOML table of a dataclass of numbers, strings and tuples of numbers."""
    fields = dataclasses.asdict(settings)
    lines = [f"{key} = {_toml(value)}" for key, value in fields.items() if value is not None]
    return "\n".join([f"[{name}]", *lines, "", ""])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)
