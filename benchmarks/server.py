"""Measure a served engine: `python -m benchmarks.server load|streams|metrics ...`.

`load --out F` starts `zlab serve` in a process of its own and sends all requests of a workload at
once over HTTP: prompts of made-up token ids, forced output lengths, `--streams` of the responses
streamed. After `--swap-at` seconds it replaces `--before` by `--after` with `POST /v1/policy`.
Tokens per second come from the server's own counter, read once a second. The requests that run at
the change have longer contexts afterwards, so a change in the middle says little about either
policy alone; `--no-swap` gives the same run under `--before` only.

`streams` measures what streamed responses cost the engine's thread. The server is real (model,
tokenizer, scheduler, HTTP), but its device only sleeps for `--step-ms` a step and gives every
request a token. Steps do not overlap here, so the time of a step beyond the sleep is host work. On
a GPU that work hides behind the step before, as long as it is shorter. With `--replicas N` there
are N such servers behind the front of `zlab serve --replicas N`.

`metrics [TRACE]` measures what `/metrics` costs the engine's thread: the events and the steps of a
simulated run (Qwen3-8B on an H200, hybrid) are counted as the server counts them, one second of
the run at a time.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import httpx
import numpy as np
import torch
from starlette.types import ASGIApp

from benchmarks.engine import header
from benchmarks.run_figures import SHARES, shared
from zlab.engine.engine import EngineSettings
from zlab.engine.input_batch import gives_token
from zlab.engine.model_runner import Decoded, ModelRunner
from zlab.engine.server.context import ServerContext, ServerSettings
from zlab.engine.server.lanes import Lane
from zlab.engine.server.launch import Process, ServerPlan, open_server
from zlab.engine.server.metrics import (
    LANE_METRICS,
    STEP_S,
    Histogram,
    LaneCounters,
    LaneReading,
    TokenGaps,
)
from zlab.engine.server.middleware import Keys
from zlab.engine.server.replicas.processes import ReplicaSettings, serve_replicas
from zlab.policies.core.plan import StepPlan
from zlab.policies.snapshot import store_policy
from zlab.policies.spec import load_policy
from zlab.sim.replay import replay
from zlab.traces.formats import read_trace
from zlab.traces.recording import TABLES
from zlab.traces.workload import TraceRequest

COUNTER = "vllm:generation_tokens_total"
START_S = 600.0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def until_ready(client: httpx.AsyncClient, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers `/health`; ends the program when it does not."""
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
    raise SystemExit(f"the server did not answer /health after {START_S:.0f} s")


async def ask(client: httpx.AsyncClient, asked: TraceRequest, vocabulary: int, stream: bool) -> str:
    """Send one request; returns its finish reason, or the error."""
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
    """Return the server's count of output tokens over all lanes."""
    text = (await client.get("/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(COUNTER)
    )


async def change(client: httpx.AsyncClient, policy: str, key: str) -> dict[str, Any]:
    """Change the policy of the server; returns the new policy and the seconds it took."""
    stored = store_policy(load_policy(policy))
    body = {
        "lane": "live", "name": stored.name, "policy": stored.toml, "digest": stored.digest,
        "sources": dict(stored.sources), "who": "benchmark", "why": "change under load",
    }  # fmt: skip
    began = time.perf_counter()
    answer = await client.post("/v1/policy", json=body, headers={"Authorization": f"Bearer {key}"})
    if answer.status_code != 200:
        raise SystemExit(f"the policy was not changed: {answer.status_code} {answer.text[:500]}")
    return {"seconds": time.perf_counter() - began, "policy": answer.json()["policy"]}


async def play(
    given: argparse.Namespace, url: str, key: str, server: "subprocess.Popen[bytes]"
) -> dict[str, Any]:
    """Send the workload and change the policy; returns what was read from the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=httpx.Timeout(None), limits=limits
    ) as client:
        await until_ready(client, server)
        path = Path(given.workload)
        load = list(
            read_trace(path if path.is_file() else shared("workloads", f"{given.workload}.jsonl"))
        )
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
    """Return tokens per second before and after the change, and 30 seconds on either side."""

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
    """Return the seconds from the first request until each of `SHARES` of the tokens was out.

    A share that was not reached is None. The count is assumed to grow evenly between two readings,
    which are about a second apart.
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
        growth = max(end - begin, 1.0)  # 1 where no tokens were asked for
        found[str(share)] = end_s - (end_s - begin_s) * (end - wanted) / growth
    return found


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load`."""
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument(
        "--vocabulary", type=int, default=151_000, help="made-up token ids are below it"
    )
    parser.add_argument(
        "--workload", default="W1", help="of ../shared/workloads, or the path of a trace"
    )
    parser.add_argument("--most", type=int, help="send only the first so many requests")
    parser.add_argument("--before", default="full-kv")
    parser.add_argument("--after", default="hybrid")
    parser.add_argument(
        "--swap-at", type=float, default=40.0, help="seconds after the first request"
    )
    parser.add_argument("--no-swap", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0, help="end the run after this time")
    parser.add_argument("--streams", type=int, default=8, help="requests that are streamed")
    parser.add_argument("--kv-blocks", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)


def measure_load(given: argparse.Namespace) -> None:
    """Start the server, send the workload, stop the server, write the result."""
    port, key = free_port(), secrets.token_hex()
    options = {
        "model": given.model,
        "policy": given.before,
        "may-become": given.after,
        "kv-blocks": given.kv_blocks,
        "block-size": given.block_size,
        "max-batched-tokens": given.max_batched_tokens,
        "device": given.device,
        "port": port,
        "grace": 5,
    }
    command = [sys.executable, "-m", "zlab", "serve"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = given.out.with_suffix(".log")
    with log.open("wb") as written:
        server = subprocess.Popen(
            command, env=os.environ | {"ZLAB_ADMIN_KEY": key}, stdout=written, stderr=written
        )
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
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(given).items()
        },
        "tokens_per_s": rates(found["samples"], swap_s),
        "seconds_to_share": seconds_to_share(found["samples"], found["asked"]),
        **found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {name: result[name] for name in ("tokens_per_s", "seconds_to_share", "ends", "swap")},
            indent=1,
        )
    )


FIRST_TOKEN, NUM_TOKENS = 300, 900  # the token ids that the sleeping device gives in turn


def open_asleep(model: str, step_s: float, name: str = "") -> tuple[ServerContext, ASGIApp]:
    """Open a server whose device only sleeps; `name` is that of a replica."""
    taken = 0

    def run(self: ModelRunner, plan: StepPlan) -> Decoded:
        nonlocal taken
        taken += 1
        time.sleep(step_s)
        num_tokens = plan.num_decodes + sum(map(gives_token, plan.prefills))
        tokens = torch.full((num_tokens,), FIRST_TOKEN + taken % NUM_TOKENS, dtype=torch.int64)
        return tokens, torch.empty(num_tokens, 0)  # no logits: all requests are greedy

    ModelRunner._run_mixed = run  # type: ignore[method-assign]
    ModelRunner._run_decodes = run  # type: ignore[method-assign]
    torch.set_num_threads(1)
    settings = EngineSettings(
        model,
        num_blocks=8192,
        block_size=16,
        max_batched_tokens=8192,
        max_running=256,
        device="cpu",
        overlap=False,
    )
    return open_server(ServerPlan(settings, "full-kv"), name)


def serve_asleep(model: str, step_s: float, port: int, replicas: int) -> None:
    """Serve with devices that only sleep, until SIGTERM."""
    if replicas > 1:
        serve_replicas(
            partial(open_asleep, model, step_s),
            ReplicaSettings(replicas, "cpu"),
            ServerSettings(),
            Keys(),
            ("127.0.0.1", port),
        )
        return
    context, app = open_asleep(model, step_s)
    Process(app, context, "127.0.0.1", port).run()
    context.close(timeout_s=1.0)


async def until_port_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server on this port answers."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await until_ready(client, server)


async def ask_raw(port: int, number: int, tokens: int, stream: bool) -> tuple[int, int, float]:
    """Ask for one output; returns its events, the pieces they came in, and when the first did."""
    body = {
        "prompt": [1000 + number] * 20,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    data = json.dumps(body | {"stream": stream}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
        "application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    events, pieces, first_s = 0, 0, 0.0
    while part := await reader.read(65536):  # only counted: parsing costs more than sending
        found = part.count(b"data: {")
        if found and not events:
            first_s = time.perf_counter() - began
        events += found
        pieces += bool(found)
    writer.close()
    return events, pieces, first_s


async def ask_all(
    port: int, outputs: int, tokens: int, stream: bool
) -> list[tuple[int, int, float]]:
    """Ask for all outputs at once; returns what `ask_raw` returns for each."""
    asked = (ask_raw(port, number, tokens, stream) for number in range(outputs))
    return list(await asyncio.gather(*asked))


def measure_outputs(
    port: int, outputs: int, tokens: int, step_s: float, stream: bool
) -> dict[str, Any]:
    """Return one row: so many outputs at once, streamed or not."""
    began, busy = time.perf_counter(), time.process_time()
    answers = asyncio.run(ask_all(port, outputs, tokens, stream))
    wall = time.perf_counter() - began
    events, pieces, first_s = (sum(column) for column in zip(*answers, strict=True))
    row = {
        "outputs": outputs,
        "streamed": stream,
        "tokens_per_s": outputs * tokens / wall,
        "step_ms": wall / tokens * 1e3,
        "host_ms_a_step": (wall / tokens - step_s) * 1e3,
        "events_per_token": events / (outputs * tokens),
        "pieces_per_token": pieces / (outputs * tokens),
        "first_event_s": first_s / outputs,
        "client_busy": (time.process_time() - busy) / wall,
    }
    print({name: round(value, 3) for name, value in row.items()}, flush=True)
    return row


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `streams`."""
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--step-ms", type=float, default=9.5)
    parser.add_argument("--outputs", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--out", type=Path)


def measure_streams(given: argparse.Namespace) -> None:
    """Start the server, ask for outputs, stop the server, write the result."""
    step_s = given.step_ms / 1e3
    port = free_port()
    # Not with `-m`: a replica's process finds functions by a module's name, never `__main__`.
    arguments = (given.model, step_s, port, given.replicas)
    command = f"from benchmarks.server import serve_asleep; serve_asleep{arguments!r}"
    server = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.DEVNULL)
    try:
        asyncio.run(until_port_ready(port, server))
        rows = [
            measure_outputs(port, outputs, given.tokens, step_s, stream)
            for _ in range(given.repeat)
            for outputs in given.outputs
            for stream in (False, True)
        ]
    finally:
        server.terminate()
        server.wait(30)
    if given.out is not None:
        about = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        about |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv[1:])}
        given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


REPEATS = 200


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of one call in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_metrics(given: argparse.Namespace) -> None:
    """Count a simulated run as the server does, and print what that takes."""
    run = replay(read_trace(given.trace or shared("workloads", "W1.jsonl")), "hybrid")
    events = np.stack(
        [run.events[name].to_numpy().astype(np.int64) for name in TABLES["events"].names], axis=1
    )
    steps = {name: run.steps[name].to_numpy() for name in run.steps.column_names}
    counters = LaneCounters(40960)
    seconds = steps["end_s"].astype(int)
    start = time.perf_counter()
    for second in range(int(seconds.max()) + 1):
        chosen = seconds == second
        if chosen.any():
            first, last = steps["step"][chosen][[0, -1]]
            low, high = np.searchsorted(events[:, 0], (first, last + 1))
            counters.count_events(events[low:high])
            counters.count_steps({name: values[chosen] for name, values in steps.items()})
    bulk_s = time.perf_counter() - start
    num_requests, num_steps = run.requests.num_rows, run.steps.num_rows
    print(
        f"{len(events):,} rows, {num_steps:,} steps, {num_requests:,} requests, "
        f"{run.summary['makespan_s']:,.0f} s of "
        f"run: {bulk_s:.3f} s of counting, {bulk_s / num_steps * 1e6:.2f} us a step, "
        f"{bulk_s / num_requests * 1e6:.0f} us a request, "
        f"{bulk_s / run.summary['makespan_s']:.4%} of the time"
    )
    numbers = [list(range(256)), list(range(256))]
    gaps, moment = TokenGaps(Histogram(STEP_S)), 0

    def uneventful_step() -> None:
        nonlocal moment
        moment += 1
        gaps.step(numbers[moment % 2], moment)

    def mixed_step() -> None:
        nonlocal moment
        moment += 1
        gaps.step(list(range(moment % 2, 256 + moment % 2)), moment)

    print(
        f"gaps of 256 outputs: {median_seconds(uneventful_step) * 1e6:.1f} us for the same batch, "
        f"{median_seconds(mixed_step) * 1e6:.1f} us for a step in which requests join or end"
    )
    histograms = [metric for metric in LANE_METRICS if metric.kind == "histogram"]
    reading = LaneReading(cast(Lane, None), counters)  # no histogram reads the lane

    def copy_histograms() -> object:
        return [metric.sample(reading) for metric in histograms]

    print(f"a scrape copies histograms in {median_seconds(copy_histograms) * 1e6:.0f} us")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that the first argument names."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(required=True, metavar="load|streams|metrics")
    load = parts.add_parser("load", help="a workload over HTTP, the policy changed meanwhile")
    add_load_options(load)
    load.set_defaults(run=measure_load)
    streams = parts.add_parser("streams", help="the host's cost of streamed responses")
    add_stream_options(streams)
    streams.set_defaults(run=measure_streams)
    metrics = parts.add_parser("metrics", help="the cost of counting for /metrics")
    metrics.add_argument("trace", nargs="?", help="a trace; by default W1")
    metrics.set_defaults(run=measure_metrics)
    given = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = vars(given).pop("run")
    run(given)


if __name__ == "__main__":
    main()
