"""Asks a model through the OpenAI API with nothing but Python, and prints its answer as it comes: chat.py URL MODEL TEXT."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request


def main(url: str, model: str, text: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 64, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event.startswith("{"):
                    print(words(json.loads(event)), end="", flush=True)
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["message"], file=sys.stderr)
        return 1
    print()
    return 0


def words(event: dict[str, list[dict[str, dict[str, str]]]]) -> str:
    if "error" in event:
        raise SystemExit(f"the stream broke off: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
