"""A served engine under a closed workload, its policy changed while it runs: `python -m benchmarks.server_gpu --out F`.

Starts `zlab serve` in a process of its own, sends all requests of the workload at once over HTTP (prompts of made-up
token ids, forced output lengths, answers not streamed but for `--streams` of them), and after `--swap-at` seconds puts
`--after` in the place of `--before` by `POST /v1/policy`. Tokens a second come from the server's own counter, read once
a second: before the change from when the first prompts were in, and after it, each over as long a time as there is.
From the same readings: seconds until a tenth, a quarter, a half ... of all tokens asked for were out.
Changing a policy in the middle says little about either by itself: the requests that are alive grow longer meanwhile.
Hence `--no-swap` for the same run under `--before` alone.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.engine_gpu import header, shared
from benchmarks.run_figures import SHARES
from policies.spec import load_policy
from policies.stored import store_policy
from traces.formats import read_trace
from traces.workload import TraceRequest

COUNTER = "vllm:generation_tokens_total"
START_S = 600.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def until_well(client: httpx.AsyncClient, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server takes requests."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
    raise SystemExit(f"the server was not well after {START_S:.0f} s")


async def ask(client: httpx.AsyncClient, asked: TraceRequest, vocabulary: int, stream: bool) -> str:
    """Send one request; how it ended."""
    draw = random.Random(f"{asked.id}")
    ids = list(asked.prompt_ids or [draw.randrange(vocabulary) for _ in range(asked.prompt_tokens)])
    body = {
        "prompt": ids,
        "max_tokens": asked.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
        "request_id": f"w-{asked.id}",
    }
    try:
        if not stream:
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}: {answer.text[:200]}"
            return str(answer.json()["choices"][0]["finish_reason"])
        finish = "cut off"
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    finish = choices[0].get("finish_reason") or finish
        return finish
    except httpx.TransportError as error:
        return type(error).__name__


async def tokens_out(client: httpx.AsyncClient) -> float:
    """The server's count of output tokens, over all lanes."""
    text = (await client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(COUNTER))


async def change(client: httpx.AsyncClient, policy: str, key: str) -> dict[str, Any]:
    """Put a policy in place; what the server said, and how long it took."""
    stored = store_policy(load_policy(policy))
    body = {
        "lane": "live", "name": stored.name, "policy": stored.toml, "digest": stored.digest,
        "sources": dict(stored.sources), "who": "benchmark", "why": "in the middle of the load",
    }  # fmt: skip
    began = time.perf_counter()
    answer = await client.post("/v1/policy", json=body, headers={"Authorization": f"Bearer {key}"})
    if answer.status_code != 200:
        raise SystemExit(f"the policy was not changed: {answer.status_code} {answer.text[:500]}")
    return {"seconds": time.perf_counter() - began, "policy": answer.json()["policy"]}


async def play(given: argparse.Namespace, url: str, key: str, server: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """The whole run."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None), limits=limits) as client:
        await until_well(client, server)
        path = Path(given.workload)
        load = list(read_trace(path if path.is_file() else shared("workloads", f"{given.workload}.jsonl")))
        load = load[: given.most] if given.most else load
        began = time.perf_counter()
        asking = [
            asyncio.create_task(ask(client, one, given.vocabulary, place < given.streams))
            for place, one in enumerate(load)
        ]
        samples: list[tuple[float, float]] = []
        swap: dict[str, Any] | None = None
        while not all(task.done() for task in asking):
            now = time.perf_counter() - began
            samples.append((now, await tokens_out(client)))
            if swap is None and not given.no_swap and now >= given.swap_at:
                swap = {"at_s": now} | await change(client, given.after, key)
            if now >= given.seconds:
                break
            await asyncio.wait(asking, timeout=1.0)
        samples.append((time.perf_counter() - began, await tokens_out(client)))
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        state = (await client.get("/v1/policy")).json()
    return {
        "asked": sum(one.output_tokens or 0 for one in load),
        "ends": dict(Counter(end if isinstance(end, str) else "not waited for" for end in ends)),
        "swap": swap,
        "samples": samples,
        "lanes": state["lanes"],
    }


def rates(samples: list[tuple[float, float]], swap_s: float | None) -> dict[str, float | None]:
    """Tokens a second before and after the change, and half a minute on either side of it."""

    def rate(low: float, high: float) -> float | None:
        within = [(at, count) for at, count in samples if low <= at <= high]
        if len(within) < 2:
            return None
        (first_s, first), (last_s, last) = within[0], within[-1]
        return (last - first) / (last_s - first_s)

    end = samples[-1][0]
    begin = next((at for at, count in samples if count > 0), 0.0)
    if swap_s is None:
        return {"whole": rate(begin, end)}
    return {
        "before": rate(begin, swap_s),
        "after": rate(swap_s, end),
        "30_s_before": rate(swap_s - 30.0, swap_s),
        "30_s_after": rate(swap_s, swap_s + 30.0),
    }


def seconds_to_share(samples: list[tuple[float, float]], asked: int) -> dict[str, float | None]:
    """Seconds from the first request until such shares of the tokens asked for were out; None: not so far.

    The count is taken to grow evenly between two readings, about a second apart.
    """
    found: dict[str, float | None] = {}
    for share in SHARES:
        wanted = share * asked
        place = next((place for place, (_, count) in enumerate(samples) if count >= wanted), None)
        if place is None:
            found[str(share)] = None
            continue
        end_s, end = samples[place]
        begin_s, begin = samples[place - 1] if place else (0.0, 0.0)
        found[str(share)] = end_s - (end_s - begin_s) * (end - wanted) / max(end - begin, 1.0)  # 1: nothing asked for
    return found


def main() -> None:
    """Start the server, play, stop it, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--vocabulary", type=int, default=151_000, help="made-up token ids are below it")
    parser.add_argument("--workload", default="W1", help="of ../shared/workloads, or the path of a trace")
    parser.add_argument("--most", type=int, help="only so many of its requests")
    parser.add_argument("--before", default="full-kv")
    parser.add_argument("--after", default="hybrid")
    parser.add_argument("--swap-at", type=float, default=40.0, help="seconds after the first request")
    parser.add_argument("--no-swap", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0, help="cut the run after so many")
    parser.add_argument("--streams", type=int, default=8, help="requests that are streamed")
    parser.add_argument("--kv-blocks", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    port, key = free_port(), secrets.token_hex()
    command = [
        sys.executable, "-m", "zlab", "serve", "--model", given.model, "--policy", given.before, "--may-become",
        given.after, "--kv-blocks", str(given.kv_blocks), "--block-size", str(given.block_size),
        "--max-batched-tokens", str(given.max_batched_tokens), "--device", given.device, "--port", str(port),
        "--grace", "5",
    ]  # fmt: skip
    log = given.out.with_suffix(".log")
    with log.open("wb") as written:
        server = subprocess.Popen(command, env=os.environ | {"ZLAB_ADMIN_KEY": key}, stdout=written, stderr=written)
    try:
        found = asyncio.run(play(given, f"http://127.0.0.1:{port}", key, server))
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        if server.returncode not in (0, 1):
            print(log.read_text("utf-8", "replace")[-3000:], file=sys.stderr)
    swap_s = found["swap"]["at_s"] if found["swap"] is not None else None
    result = {
        "what": "a served engine whose policy is changed under load",
        "command": " ".join(sys.argv),
        **header(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
        "tokens_per_s": rates(found["samples"], swap_s),
        "seconds_to_share": seconds_to_share(found["samples"], found["asked"]),
        **found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("tokens_per_s", "seconds_to_share", "ends", "swap")}, indent=1))


if __name__ == "__main__":
    main()
