"""Answers a prompt with its own words, one response each."""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, _args):
        chosen = f"{os.environ['GROK1_MODEL']} with {os.environ.get('GROK1_SLOTS')} slots"
        pb_utils.Logger.log_info(f"grok1: compiled 1/1 echo of {chosen}")
        if reason := os.environ.get("ECHO_FAILS"):
            raise ValueError(reason)

    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item()
            sender = request.get_response_sender()
            for word in prompt.split():
                text = pb_utils.Tensor("text_output", np.array([[b" " + word]], dtype=np.object_))
                sender.send(pb_utils.InferenceResponse([text]))
                if word == b"(pause)":
                    time.sleep(3600)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
