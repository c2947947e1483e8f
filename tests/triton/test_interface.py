"""The table of inputs and outputs, and the files that are made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grok1_backend.engine.errors import EngineError
from grok1_backend.triton.documentation import renew
from grok1_backend.triton.interface import ENGINE_SETTINGS, MODELS, NUMPY, Input
from grok1_backend.triton.model_config import complete, ensemble_config
from grok1_backend.triton.parsing import ClientRequest, RequestParser

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
RANGES = [field for field in ENGINE_SETTINGS if field.bounds]


class Config:
    """Notes what a config is completed with."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, object]] = []
        self.outputs: list[dict[str, object]] = []
        self.decoupled: bool | None = None
        self.max_batch_size = 0

    def set_max_batch_size(self, size: int) -> None:
        self.max_batch_size = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.decoupled = policy["decoupled"]

    def add_input(self, field: dict[str, object]) -> None:
        self.inputs.append(field)

    def add_output(self, field: dict[str, object]) -> None:
        self.outputs.append(field)


def test_the_repository_holds_the_models_of_the_table() -> None:
    assert {path.name for path in REPOSITORY.iterdir()} == set(MODELS)


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("*/1/model.py")), ids=lambda p: p.parts[-3])
def test_an_adapter_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def test_the_ensemble_is_as_the_table_says() -> None:
    assert (REPOSITORY / "grok1_ensemble" / "config.pbtxt").read_text() == ensemble_config()


def test_the_documentation_is_as_the_table_says() -> None:
    page = (ROOT / "docs" / "interface.md").read_text()
    assert renew(page) == page
    assert all(f"`{field.name}`" in page for m in MODELS.values() for field in m.inputs[:1])


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_a_config_is_completed(model) -> None:  # type: ignore[no-untyped-def]
    config = complete(Config(), model)
    assert [field["name"] for field in config.inputs] == [field.name for field in model.inputs]
    assert [field["name"] for field in config.outputs] == [field.name for field in model.outputs]
    assert all(field["optional"] for field in config.inputs)
    assert (config.decoupled, config.max_batch_size) == (model.decoupled, model.max_batch_size)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_no_name_occurs_twice(model) -> None:  # type: ignore[no-untyped-def]
    for fields in (model.inputs, model.outputs):
        names = [field.name for field in fields]
        assert len(names) == len(set(names))


def parse(field: Input, value: float) -> None:
    tensors = {
        "input_ids": np.array([[5]], np.int32),
        # So that no other limit is met first.
        "return_prompt_log_probs": np.array([[True]]),
        "max_tokens": np.array([[2**31 - 1]], np.int32),
        field.name: np.array([[value]], NUMPY[field.data_type]),
    }
    RequestParser(end_ids=(2,), default_max_tokens=16).parse(ClientRequest(tensors=tensors))


@pytest.mark.parametrize("field", RANGES, ids=lambda field: field.name)
def test_a_documented_range_is_the_one_that_is_kept(field: Input) -> None:
    assert field.bounds is not None
    low, high = field.bounds
    if field.name == "repetition_penalty":
        low = np.nextafter(np.float32(low), np.float32(1))  # 0.01 has no exact float32
    parse(field, low)
    parse(field, high)
    kind = NUMPY[field.data_type]
    outside = [low - 1, high + 1]
    if kind is np.int32:
        outside = [value for value in outside if -(2**31) <= value < 2**31]
    else:
        outside += [float("nan"), float("inf")]
    for value in outside:
        with pytest.raises(EngineError, match=field.name):
            parse(field, value)
