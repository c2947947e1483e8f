"""The dimensions of a Grok-1-architecture model, read from the `[model]` table of a TOML file."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from grok1_backend.settings import from_table

TABLES = ("model", "runner", "engine")
"""What a config file may hold: the architecture, the device side, the host side."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrokConfig:
    """Everything that defines the computation; field names follow xAI's research code."""

    vocab_size: int
    sequence_len: int
    """Context length: the most tokens of prompt and output together."""
    emb_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    key_size: int
    """Width of one attention head."""
    widening_factor: float
    num_experts: int
    num_selected_experts: int
    embedding_multiplier_scale: float
    output_multiplier_scale: float
    attn_output_multiplier: float
    """Multiplies q·k, in place of 1/sqrt(key_size)."""
    attn_logit_cap: float = 30.0
    """Attention logits are cap·tanh(logit/cap)."""
    rope_base: float = 10000.0
    rms_norm_eps: float = 1e-5
    pad_token: int = 0
    bos_token: int = 1
    eos_token: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_token"):
                if not 0 <= value < self.vocab_size:
                    raise ValueError(
                        f"{field.name} is {value}: an id below vocab_size ({self.vocab_size})"
                    )
            elif not value > 0:
                raise ValueError(f"{field.name} is {value}: above 0")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads is {self.num_q_heads}: "
                f"a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.key_size % 2:
            raise ValueError(f"key_size is {self.key_size}: an even number (rotary halves)")
        if self.num_selected_experts > self.num_experts:
            raise ValueError(
                f"num_selected_experts is {self.num_selected_experts}: "
                f"at most num_experts ({self.num_experts})"
            )

    @property
    def ffn_size(self) -> int:
        """Width of one expert: two thirds of the widened embedding, a multiple of 8."""
        size = int(self.widening_factor * self.emb_size) * 2 // 3
        return size + -size % 8


def config_path(name_or_path: str | Path) -> Path:
    """The file of a published config (`grok1-314b`) or of a path to a file or model directory.

    Raises:
      FileNotFoundError: neither; the message names the published ones.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.toml"
    if path.is_file():
        return path
    published = Path(str(resources.files("grok1_backend") / "configs"))
    if (published / f"{name_or_path}.toml").is_file():
        return published / f"{name_or_path}.toml"
    names = ", ".join(sorted(file.stem for file in published.glob("*.toml")))
    raise FileNotFoundError(
        f"no config {str(name_or_path)!r}: "
        f"a path to a config.toml or its directory, or one of {names}"
    )


def read_tables(name_or_path: str | Path) -> dict[str, dict[str, Any]]:
    """The tables of a config file: `model` and, optionally, `runner` and `engine`.

    Raises:
      ValueError: a table that is unknown or missing, or a file that is not TOML.
    """
    path = config_path(name_or_path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    for name in tables:
        if name not in TABLES:
            known = ", ".join(f"[{table}]" for table in TABLES)
            raise ValueError(f"{path}: unknown table [{name}]; known are {known}")
    if "model" not in tables:
        raise ValueError(f"{path}: the table [model] is missing")
    return tables


def load_config(name_or_path: str | Path) -> GrokConfig:
    """Reads the `[model]` table. Unknown, missing and inconsistent fields are refused by name."""
    return from_table(GrokConfig, read_tables(name_or_path)["model"], where="[model]")
