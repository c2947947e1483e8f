"""Asks many prompts at once with asyncio, and prints each answer when it is complete.

python asyncio_many.py --url localhost:8001 --count 16
"""

import argparse
import asyncio
from collections.abc import AsyncIterator

import numpy as np
import tritonclient.grpc.aio as grpc

PROMPTS = ("In the beginning", "And it came to pass", "Blessed are", "The king said")


def tensor(name: str, value: object, data_type: str, dtype: type) -> grpc.InferInput:
    array = np.array([[value]], dtype=dtype)
    result = grpc.InferInput(name, array.shape, data_type)
    result.set_data_from_numpy(array)
    return result


async def answer(client: grpc.InferenceServerClient, prompt: str, max_tokens: int) -> str:
    async def requests() -> AsyncIterator[dict]:
        yield {
            "model_name": "grok1_generate",
            "inputs": [
                tensor("text_input", prompt.encode(), "BYTES", object),
                tensor("max_tokens", max_tokens, "INT32", np.int32),
            ],
        }

    text = ""
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        text += result.as_numpy("text_output").item().decode()
        if result.as_numpy("finish_reason").item():
            break
    return text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--count", type=int, default=16, help="prompts at one time")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(args.count)]
    async with grpc.InferenceServerClient(args.url) as client:

        async def show(number: int, prompt: str) -> None:
            text = await answer(client, prompt, args.max_tokens)
            print(f"[{number}] {prompt}|{text!r}")

        await asyncio.gather(*(show(number, prompt) for number, prompt in enumerate(prompts)))


if __name__ == "__main__":
    asyncio.run(main())
