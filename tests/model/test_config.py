"""What a config file may say, and how it is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.model.config import GrokConfig, config_path, load_config, read_tables
from grok1_backend.settings import from_table

MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "sequence_len": 64,
    "emb_size": 32,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "key_size": 16,
    "widening_factor": 8.0,
    "num_experts": 8,
    "num_selected_experts": 2,
    "embedding_multiplier_scale": 1.0,
    "output_multiplier_scale": 1.0,
    "attn_output_multiplier": 0.25,
}
TABLES = {"model": GrokConfig, "runner": RunnerSettings, "engine": EngineSettings}
PUBLISHED = sorted(path.stem for path in config_path("grok1-314b").parent.glob("*.toml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, r"\[model\] has an unknown field num_layer; did you mean num_layers\?"),
        ({"colour": 1}, r"\[model\] has an unknown field colour$"),
        ({"emb_size": None}, r"\[model\] lacks the field emb_size"),
        ({"emb_size": "32"}, r"\[model\] emb_size is '32': int expected"),
        ({"emb_size": 32.0}, r"\[model\] emb_size is 32.0: int expected"),
        ({"num_layers": True}, r"\[model\] num_layers is True: int expected"),
        ({"num_layers": 0}, r"\[model\] num_layers is 0: above 0"),
        ({"num_q_heads": 3}, r"num_q_heads is 3: a multiple of num_kv_heads \(2\)"),
        ({"key_size": 15}, r"key_size is 15: an even number"),
        ({"num_selected_experts": 9}, r"num_selected_experts is 9: at most num_experts \(8\)"),
        ({"eos_token": 512}, r"eos_token is 512: an id below vocab_size \(512\)"),
        ({"pad_token": -1}, r"pad_token is -1: an id below vocab_size \(512\)"),
        ({"attn_output_multiplier": float("nan")}, r"attn_output_multiplier is nan: above 0"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    table = {name: value for name, value in (MODEL | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        from_table(GrokConfig, table, where="[model]")


def test_integers_are_taken_for_floats() -> None:
    config = from_table(GrokConfig, MODEL | {"widening_factor": 8}, where="[model]")
    assert config.widening_factor == 8.0
    assert isinstance(config.widening_factor, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modell]\n", r"unknown table \[modell\]; known are \[model\], \[runner\], \[engine\]"),
        ("[engine]\n", r"the table \[model\] is missing"),
        ("model = \n", r"config.toml: "),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tables(tmp_path)


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(FileNotFoundError, match="grok1-314b"):
        config_path("grok1-315b")


def test_the_released_sizes() -> None:
    config = load_config("grok1-314b")
    assert config.ffn_size == 32768
    # xAI announced "314B parameters", of which "25 %" are used for a token.
    expert = 3 * config.emb_size * config.ffn_size
    total = config.num_layers * config.num_experts * expert
    assert 0.30e12 < total < 0.32e12


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_valid_and_documented(name: str) -> None:
    tables = read_tables(name)
    for table, values in tables.items():
        from_table(TABLES[table], values, where=f"[{table}]")
    text = config_path(name).read_text()
    for line in text.splitlines():
        assert not re.match(r"\w+ *=", line) or "#" in line, f"{line!r} says nothing of its field"


def test_one_published_config_shows_every_field() -> None:
    tables = read_tables("tiny")
    for table, cls in TABLES.items():
        assert set(tables[table]) == {field.name for field in dataclasses.fields(cls)}
