"""The stateless text front: a prompt in, a stream of text out."""

from __future__ import annotations

from typing import Any

from grok1_backend.triton.environment import load_tokenizer
from grok1_backend.triton.front import GenerateModel
from grok1_backend.triton.interface import GENERATE
from grok1_backend.triton.model_config import complete


class TritonPythonModel:
    """Calls `grok1` from threads."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds the inputs and outputs to the config."""
        return complete(config, GENERATE)

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer."""
        self._model = GenerateModel(load_tokenizer(args))

    def execute(self, requests: list[Any]) -> None:
        """Hands requests to threads, which send the responses."""
        for request in requests:
            self._model.serve(request)

    def finalize(self) -> None:
        """Waits for the threads."""
        self._model.close()
