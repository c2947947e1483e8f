"""Token ids to text, for the ensemble: each response by itself."""

from __future__ import annotations

from typing import Any

from grok1_backend.triton.environment import load_tokenizer
from grok1_backend.triton.interface import POSTPROCESS, TEXT_OUTPUT, Tensors
from grok1_backend.triton.model_config import complete
from grok1_backend.triton.requests import client_requests
from grok1_backend.triton.responses import respond
from grok1_backend.triton.text_steps import response_text


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

    def _decode(self, request: Any) -> Tensors:
        (client,) = client_requests(request)
        text = response_text(self._tokenizer, client.tensors)
        return {TEXT_OUTPUT.name: TEXT_OUTPUT.tensor(text)}
