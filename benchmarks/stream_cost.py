"""What streams cost the engine's thread: `python -m benchmarks.stream_cost [--out F]`.

A real server (model, tokenizer, scheduler, HTTP) whose device stands in for a card: a step sleeps for `--step-ms` and
gives every request a token. Clients in a process of their own ask for so many outputs at once, streamed and not. Steps
do not overlap here, so what a step takes beyond its sleep is the host's work, event loop and all; on a card it hides
behind the step before, as long as it is shorter. Ports are taken as they are free.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.server_gpu import free_port, until_well
from engine.build import EngineSettings
from engine.decode_graphs import Decoded
from engine.prefilling import gives_token
from engine.runner import Runner
from engine.server.process import Process
from engine.server.server import ServerPlan, open_server
from policies.core.plan import StepPlan
from zlab.serve import SWITCH_S

FIRST_TOKEN, NUM_TOKENS = 300, 900  # of those that are given out, in turn


def serve(model: str, step_s: float, port: int) -> None:
    """The server, until it is told to end."""
    taken = 0

    def run(self: Runner, plan: StepPlan) -> Decoded:
        nonlocal taken
        taken += 1
        time.sleep(step_s)
        num_tokens = plan.num_decodes + sum(map(gives_token, plan.prefills))
        tokens = torch.full((num_tokens,), FIRST_TOKEN + taken % NUM_TOKENS, dtype=torch.int64)
        return tokens, torch.empty(num_tokens, 0)  # nobody draws from the logits: all requests are greedy

    Runner._run_mixed = run  # type: ignore[method-assign]
    Runner._run_decodes = run  # type: ignore[method-assign]
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    settings = EngineSettings(
        model, num_blocks=8192, block_size=16, max_batched_tokens=8192, max_running=256, device="cpu", overlap=False
    )
    house, app = open_server(ServerPlan(settings, "full-kv"))
    Process(app, house, "127.0.0.1", port).run()
    house.close(timeout_s=1.0)


async def well(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server takes requests."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await until_well(client, server)


async def ask(port: int, number: int, tokens: int, stream: bool) -> int:
    """One output; how many events it came in."""
    body = {"prompt": [1000 + number] * 20, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    data = json.dumps(body | {"stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    events = 0
    while part := await reader.read(65536):  # counted as it comes: parsing would cost more than sending
        events += part.count(b"data: {")
    writer.close()
    return events


async def ask_all(port: int, outputs: int, tokens: int, stream: bool) -> int:
    """All outputs at once."""
    return sum(await asyncio.gather(*(ask(port, number, tokens, stream) for number in range(outputs))))


def measure(port: int, outputs: int, tokens: int, step_s: float, stream: bool) -> dict[str, Any]:
    """One row."""
    began, busy = time.perf_counter(), time.process_time()
    events = asyncio.run(ask_all(port, outputs, tokens, stream))
    wall = time.perf_counter() - began
    row = {
        "outputs": outputs,
        "streamed": stream,
        "tokens_per_s": outputs * tokens / wall,
        "step_ms": wall / tokens * 1e3,
        "host_ms_a_step": (wall / tokens - step_s) * 1e3,
        "events_per_token": events / (outputs * tokens),
        "client_busy": (time.process_time() - busy) / wall,
    }
    print({name: round(value, 3) for name, value in row.items()}, flush=True)
    return row


def main() -> None:
    """Start the server, ask, stop it, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--step-ms", type=float, default=9.5)
    parser.add_argument("--outputs", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    step_s = given.step_ms / 1e3
    if given.serve:
        serve(given.model, step_s, given.serve)
        return
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.stream_cost", "--serve", str(port), "--model", given.model]
    server = subprocess.Popen([*command, "--step-ms", str(given.step_ms)], stderr=subprocess.DEVNULL)
    try:
        asyncio.run(well(port, server))
        rows = [
            measure(port, outputs, given.tokens, step_s, stream)
            for _ in range(given.repeat)
            for outputs in given.outputs
            for stream in (False, True)
        ]
    finally:
        server.terminate()
        server.wait(30)
    if given.out is not None:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        about |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv[1:])}
        given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
