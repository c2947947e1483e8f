"""Text to token ids, for the ensemble."""

from __future__ import annotations

from typing import Any

from grok1_backend.triton.environment import load_tokenizer
from grok1_backend.triton.interface import PREPROCESS, PROMPT_IDS, PROMPT_TEXT, Values
from grok1_backend.triton.model_config import complete
from grok1_backend.triton.requests import client_requests
from grok1_backend.triton.responses import respond
from grok1_backend.triton.text_steps import read_prompt


class TritonPythonModel:
    """A tokenizer."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds the inputs and outputs to the config."""
        return complete(config, PREPROCESS)

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer."""
        self._tokenizer = load_tokenizer(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request."""
        return [respond(request, self._encode) for request in requests]

    def _encode(self, request: Any) -> Values:
        (client,) = client_requests(request)
        prompt = read_prompt(self._tokenizer, client)
        return {
            PROMPT_IDS.name: PROMPT_IDS.tensor(prompt.ids),
            PROMPT_TEXT.name: prompt.text,
        }
