"""Continues one text in several turns: the server keeps what came before, only the new is sent.

python grpc_sequence.py --url localhost:8001 "In the beginning" " And the earth" " And God said"
"""

import argparse
import queue
import uuid

import numpy as np
import tritonclient.grpc as grpc


def tensor(name: str, value: object, data_type: str, dtype: type) -> grpc.InferInput:
    array = np.array([[value]], dtype=dtype)
    result = grpc.InferInput(name, array.shape, data_type)
    result.set_data_from_numpy(array)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "turns", nargs="*", default=["In the beginning", " And the earth", " And God said"]
    )
    parser.add_argument("--url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()

    sequence_id = str(uuid.uuid4())  # a number works as well
    answers: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, turn in enumerate(args.turns):
            inputs = [
                tensor("text_input", turn.encode(), "BYTES", object),
                tensor("max_tokens", args.max_tokens, "INT32", np.int32),
            ]
            client.async_stream_infer(
                "grok1_ensemble",
                inputs,
                sequence_id=sequence_id,
                sequence_start=number == 0,
                sequence_end=number == len(args.turns) - 1,
            )
            print(f"[{number + 1}] {turn!r} ->", end=" ", flush=True)
            finished = False
            while not finished:
                result, error = answers.get(timeout=300)
                if error is not None:
                    raise SystemExit(f"error: {error}")
                print(result.as_numpy("text_output").item().decode(), end="", flush=True)
                finished = result.as_numpy("finish_reason").item() != b""
            print(f"  ({result.as_numpy('num_input_tokens').item()} tokens of context)")
        client.stop_stream()


if __name__ == "__main__":
    main()
