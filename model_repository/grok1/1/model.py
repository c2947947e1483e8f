"""The engine as a Triton model: token ids in, token ids out, streamed; sequences are sessions."""

from __future__ import annotations

from typing import Any

from grok1_backend.triton.interface import GROK1
from grok1_backend.triton.model_config import complete


class TritonPythonModel:
    """One engine for one instance of the model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds the inputs and outputs to the config."""
        return complete(config, GROK1)

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model and compiles it; Triton says READY after that."""
        # Here, as it imports JAX, which is not needed where a stub only completes the config.
        from grok1_backend.triton.loading import load_engine_model

        self._model = load_engine_model(args)

    def execute(self, requests: list[Any]) -> None:
        """Takes requests in; their responses come from a thread."""
        for request in requests:
            self._model.serve(request)

    def finalize(self) -> None:
        """Ends all requests and threads."""
        self._model.close()
