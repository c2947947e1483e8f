"""Token ids to text, for the ensemble: each response by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from grok1_backend.triton.environment import load_tokenizer
from grok1_backend.triton.interface import POSTPROCESS, TEXT_OUTPUT, Values
from grok1_backend.triton.model_config import complete
from grok1_backend.triton.responses import respond
from grok1_backend.triton.text_steps import response_texts


class TritonPythonModel:
    """The table of the tokens' bytes."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds the inputs and outputs to the config."""
        return complete(config, POSTPROCESS)

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer."""
        self._tokenizer = load_tokenizer(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request."""
        return [respond(request, self._decode) for request in requests]

    def _decode(self, request: Any) -> Values:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        texts = response_texts(self._tokenizer, tensors)
        if len(texts) == 1:
            return {TEXT_OUTPUT.name: texts[0]}
        return {TEXT_OUTPUT.name: np.array([[text.encode()] for text in texts], np.object_)}
