"""Traffic for a server of `zlab serve`: `python docs/examples/traffic.py URL [--requests N]
[--output TOKENS]`.

Sends requests one hard upon another, prompts of token ids, so that any model will do, and prints
how each ended. Uses the standard library only; the API key, if the server wants one, is taken from
ZLAB_API_KEY.
"""

import argparse
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor


def ask(url: str, body: dict[str, object]) -> str:
    """How one completion ended: its finish reason, or the error that it met."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("ZLAB_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["finish_reason"])
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {json.load(error)['error']['message']}"


def main() -> None:
    """Send, wait, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="as http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=24, help="tokens")
    parser.add_argument(
        "--output", type=int, default=100, help="tokens, about; each request has its own length"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    bodies: list[dict[str, object]] = [
        {
            "prompt": [draw.randrange(1, 90) for _ in range(given.prompt)],
            "max_tokens": draw.randrange(given.output // 2, given.output * 3 // 2),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        for _ in range(given.requests)
    ]
    with ThreadPoolExecutor(given.requests) as pool:
        answers = []
        for body in bodies:
            answers.append(pool.submit(ask, given.url, body))
            time.sleep(0.02)  # so that they come in this order
        ends = Counter(answer.result() for answer in answers)
    print(", ".join(f"{count} x {end}" for end, count in ends.most_common()))


if __name__ == "__main__":
    main()
