"""Asks the ensemble of this folder: the answer of grok1_complete with some words masked.

The server must load both repositories: model_repository/ of the project and of this folder
(`tritonserver --model-repository A --model-repository B`).

python client.py --url localhost:8000 "The wicked"
"""

import argparse

import numpy as np
import tritonclient.http as http


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The wicked")
    parser.add_argument("--url", default="localhost:8000", help="host:port of HTTP")
    args = parser.parse_args()

    prompt = http.InferInput("text_input", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[args.prompt.encode()]], dtype=object))
    with http.InferenceServerClient(args.url, network_timeout=300) as client:
        result = client.infer("masked_text", [prompt])
    print("written:", repr(result.as_numpy("unmasked").item().decode()))
    print("masked: ", repr(result.as_numpy("text_output").item().decode()))


if __name__ == "__main__":
    main()
