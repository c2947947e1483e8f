"""Streams the answer to one prompt over HTTP, as server-sent events; only the standard library.

python http_generate_stream.py --url http://localhost:8000 "In the beginning"
"""

import argparse
import json
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="In the beginning")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()

    body = {
        "text_input": args.prompt,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    request = urllib.request.Request(
        f"{args.url}/v2/models/grok1_generate/generate_stream",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
    )
    print(args.prompt, end="", flush=True)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    raise SystemExit(f"error: {event['error']}")
                print(event["text_output"], end="", flush=True)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"error: {error.read().decode()}") from error
    print()


if __name__ == "__main__":
    main()
