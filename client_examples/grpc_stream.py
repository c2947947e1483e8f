"""Streams the answer to one prompt over gRPC.

python grpc_stream.py --url localhost:8001 "In the beginning"
"""

import argparse
import queue

import numpy as np
import tritonclient.grpc as grpc


def tensor(name: str, value: object, data_type: str, dtype: type) -> grpc.InferInput:
    array = np.array([[value]], dtype=dtype)
    result = grpc.InferInput(name, array.shape, data_type)
    result.set_data_from_numpy(array)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="In the beginning")
    parser.add_argument("--url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()

    inputs = [
        tensor("text_input", args.prompt.encode(), "BYTES", object),
        tensor("max_tokens", args.max_tokens, "INT32", np.int32),
        tensor("temperature", args.temperature, "FP32", np.float32),
    ]
    answers: queue.Queue = queue.Queue()
    print(args.prompt, end="", flush=True)
    with grpc.InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("grok1_generate", inputs)
        finished = False
        while not finished:
            result, error = answers.get(timeout=300)
            if error is not None:
                raise SystemExit(f"error: {error}")
            print(result.as_numpy("text_output").item().decode(), end="", flush=True)
            finished = result.as_numpy("finish_reason").item() != b""
        client.stop_stream()
    print()


if __name__ == "__main__":
    main()
