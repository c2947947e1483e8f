"""The models' configs for Triton, made from the table of inputs and outputs.

Python models complete their config when they load. An ensemble has no code that could, so its
config.pbtxt is printed by `python -m grok1_backend.triton.model_config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grok1_backend.triton.interface import (
    ENSEMBLE,
    ERROR,
    GROK1,
    INPUT_IDS,
    POSTPROCESS,
    PREPROCESS,
    PROMPT_IDS,
    PROMPT_TEXT,
    Model,
    Output,
)


def complete(config: Any, model: Model) -> Any:
    """Fills what a model's config.pbtxt leaves out; for `auto_complete_config`."""
    config.set_max_batch_size(model.max_batch_size)
    config.set_model_transaction_policy({"decoupled": model.decoupled})
    for taken in model.inputs:
        config.add_input({**_tensor(taken), "optional": True})
    for sent in model.outputs:
        config.add_output(_tensor(sent))
    return config


def _tensor(field: Output) -> dict[str, Any]:
    return {"name": field.name, "data_type": field.data_type, "dims": list(field.dims)}


def ensemble_config() -> str:
    """The text of grok1_ensemble/config.pbtxt."""
    known = (PROMPT_TEXT, *ENSEMBLE.inputs)
    settings = _same(field for field in GROK1.inputs if field in known)
    sent = _same(field for field in GROK1.outputs if field is not ERROR)
    shown = {PROMPT_TEXT.name: "shown_prompt_text"}  # what of it goes on behind grok1
    steps = (
        _step(PREPROCESS, _same(PREPROCESS.inputs), _same(PREPROCESS.outputs)),
        _step(GROK1, settings | {INPUT_IDS.name: PROMPT_IDS.name}, sent | shown),
        _step(POSTPROCESS, _same(POSTPROCESS.inputs) | shown, _same(POSTPROCESS.outputs)),
    )
    parts = [
        "# Printed by `python -m grok1_backend.triton.model_config`.",
        'platform: "ensemble"',
        f"max_batch_size: {ENSEMBLE.max_batch_size}",
        *(_declared("input", field, " optional: true") for field in ENSEMBLE.inputs),
        *(_declared("output", field) for field in ENSEMBLE.outputs),
        "ensemble_scheduling {",
        *steps,
        "}",
    ]
    return "\n".join(parts) + "\n"


def _same(fields: Iterable[Output]) -> dict[str, str]:
    return {field.name: field.name for field in fields}


def _declared(kind: str, field: Output, more: str = "") -> str:
    dims = ", ".join(str(size) for size in field.dims)
    return f'{kind} {{ name: "{field.name}" data_type: {field.data_type} dims: [ {dims} ]{more} }}'


def _step(model: Model, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [
        *(
            f'    input_map {{ key: "{name}" value: "{tensor}" }}'
            for name, tensor in inputs.items()
        ),
        *(
            f'    output_map {{ key: "{name}" value: "{tensor}" }}'
            for name, tensor in outputs.items()
        ),
    ]
    lines = ["  step {", f'    model_name: "{model.name}"', "    model_version: -1", *maps, "  }"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(ensemble_config(), end="")
