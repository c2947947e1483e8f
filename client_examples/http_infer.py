"""Gets the whole answers to several prompts in one HTTP call.

python http_infer.py --url localhost:8000 "In the beginning" "And it came to pass"
"""

import argparse

import numpy as np
import tritonclient.http as http


def tensor(name: str, values: list, data_type: str, dtype: type) -> http.InferInput:
    array = np.array(values, dtype=dtype).reshape(-1, 1)  # one row for each prompt
    result = http.InferInput(name, array.shape, data_type)
    result.set_data_from_numpy(array)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["In the beginning", "And it came to pass"])
    parser.add_argument("--url", default="localhost:8000", help="host:port of HTTP")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    count = len(args.prompts)
    inputs = [
        tensor("text_input", [prompt.encode() for prompt in args.prompts], "BYTES", object),
        tensor("max_tokens", [args.max_tokens] * count, "INT32", np.int32),
    ]
    with http.InferenceServerClient(args.url, network_timeout=300) as client:
        result = client.infer("grok1_complete", inputs)
    texts = result.as_numpy("text_output").reshape(-1)
    lengths = result.as_numpy("num_output_tokens").reshape(-1)
    for prompt, text, length in zip(args.prompts, texts, lengths, strict=True):
        print(f"{prompt}|{text.decode()!r} ({length} tokens)")


if __name__ == "__main__":
    main()
