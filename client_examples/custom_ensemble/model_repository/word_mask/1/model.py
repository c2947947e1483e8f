"""Puts stars in place of words that are not wanted."""

import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Stateless: works on whole texts."""

    def initialize(self, args):
        """Reads the words from config.pbtxt."""
        parameters = json.loads(args["model_config"])["parameters"]
        words = parameters["words"]["string_value"].split(",")
        self._words = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)

    def execute(self, requests):
        """One response for each request."""
        return [self._mask(request) for request in requests]

    def _mask(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().item().decode()
        masked = self._words.sub(lambda match: "*" * len(match.group()), text)
        output = pb_utils.Tensor("masked", np.array([[masked.encode()]], dtype=object))
        return pb_utils.InferenceResponse([output])
