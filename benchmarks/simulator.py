"""Measure how fast the simulator is: `python -m benchmarks.simulator [--repeat 5] [--out FILE]`.

A case starts with a workload in memory and ends with a complete recording on disk, in one process.
The start of the interpreter and the imports are measured apart. Repeats are reported as median and
range, in wall seconds and in CPU seconds. Compare ratios within one run: other work on the machine
moves all figures together.

`--scaling` measures the cost of a step over the number of requests and the size of the pool,
`--million` the memory that a million chat requests need (about 20 minutes).
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.run_figures import find_shared
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import replay
from zlab.traces.formats import read_trace
from zlab.traces.synthetic import ChatShape, Poisson, chat, fixed
from zlab.traces.workload import Workload

RATE = 4.0  # new chat sessions a second: the GPU keeps up, so the waiting queue stays bounded
REASONING = SchedulerLimits(
    num_blocks=512, block_size=256, max_batched_tokens=16384, max_running=256
)


def fixed_limits(num_blocks: int) -> SchedulerLimits:
    """The pool and the limits of workload FIX."""
    return SchedulerLimits(
        num_blocks=num_blocks, block_size=16, max_batched_tokens=8192, max_running=128
    )


def cases() -> dict[str, tuple[Callable[[], Workload], str, SchedulerLimits]]:
    """Return (workload, policy, limits) by the case's name."""
    found: dict[str, tuple[Callable[[], Workload], str, SchedulerLimits]] = {
        "FIX roomy, full-kv": (
            lambda: fixed(4000, 512, 1024, 20.0, 1),
            "full-kv",
            fixed_limits(20_000),
        ),
        "FIX tight, full-kv": (
            lambda: fixed(4000, 512, 1024, 20.0, 1),
            "full-kv",
            fixed_limits(4_000),
        ),
        "FIX roomy, hybrid": (
            lambda: fixed(4000, 512, 1024, 20.0, 1),
            "hybrid",
            fixed_limits(20_000),
        ),
        "FIX tight, hybrid": (
            lambda: fixed(4000, 512, 1024, 20.0, 1),
            "hybrid",
            fixed_limits(4_000),
        ),
    }
    path = find_shared("workloads", "W1.jsonl")
    if path is None:
        print("W1 left out: ../shared/workloads/W1.jsonl is missing", file=sys.stderr)
        return found
    for policy in ("full-kv", "hybrid"):
        found[f"W1, {policy}"] = (lambda: read_trace(path), policy, REASONING)
    return found


def measure(
    workload: Workload, policy: str, limits: SchedulerLimits, repeat: int
) -> dict[str, Any]:
    """Replay with a recording `repeat` times; returns times and counts."""
    seconds, busy, digests, summary = [], [], set(), {}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            start, start_cpu = time.perf_counter(), time.process_time()
            run = replay(workload, policy, limits=limits, out=Path(folder) / "run")
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - start_cpu)
        digests.add(run.summary["digest"])
        summary = dict(run.summary)
    assert len(digests) == 1, "the same replay decided differently"
    median = statistics.median(seconds)
    return {
        "wall_s": {"median": median, "min": min(seconds), "max": max(seconds), "repeat": repeat},
        "cpu_s": {
            "median": statistics.median(busy),
            "min": min(busy),
            "max": max(busy),
            "repeat": repeat,
        },
        "output_tokens": summary["output_tokens"],
        "requests": summary["requests_finished"],
        "steps": summary["steps"],
        "preemptions": summary["preemptions"],
        "tokens_per_wall_s": summary["output_tokens"] / median,
        "tokens_per_cpu_s": summary["output_tokens"] / statistics.median(busy),
        "requests_per_wall_s": summary["requests_finished"] / median,
        "us_per_step": median / summary["steps"] * 1e6,
    }


def start_up_seconds() -> float:
    """Time a new process that starts, imports, and replays one request (which imports the rest)."""
    start = time.perf_counter()
    one = (
        "from zlab.sim.replay import replay; from zlab.traces.synthetic import fixed; "
        "replay(fixed(1, 16, 1, 1.0, 1)).summary"
    )
    subprocess.run([sys.executable, "-c", one], check=True)
    return time.perf_counter() - start


def crowd(num_requests: int) -> Workload:
    """A chat workload with much block churn: many short turns with growing prefixes."""
    return chat(num_requests, ChatShape(), Poisson(RATE), seed=7)


def steady(num_requests: int) -> Workload:
    """A steady load: small requests at a rate that the GPU keeps up with."""
    return fixed(num_requests, 128, 64, 40.0, 1)


GROWN = {"crowd": crowd, "steady": steady}


def grown(
    workload: str, requests: list[int], blocks: list[int], block_size: int = 16
) -> list[dict[str, Any]]:
    """Replay each number of requests with each pool size; returns a row for each.

    A replay runs in a process of its own, because peak memory is that of a process.
    """
    rows = []
    for number in requests:
        for pool in blocks:
            sizes = [workload, str(number), str(pool), str(block_size)]
            command = [sys.executable, "-m", "benchmarks.simulator", "--one", *sizes]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout))
            print(rows[-1], file=sys.stderr)
    return rows


def measure_one(workload: str, num_requests: int, limits: SchedulerLimits) -> dict[str, Any]:
    """Replay one workload of `GROWN` under full-kv; returns its time and the peak memory in GB."""
    load = GROWN[workload](num_requests)
    replay(steady(1), "full-kv").summary  # noqa: B018  (imports what is imported at first use)
    with tempfile.TemporaryDirectory() as folder:
        start, start_cpu = time.perf_counter(), time.process_time()
        run = replay(load, "full-kv", limits=limits, out=Path(folder) / "run")
        wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    kept = (
        "steps",
        "output_tokens",
        "requests_finished",
        "requests_refused",
        "preemptions",
        "running_mean",
    )
    return {
        "workload": workload,
        "requests": num_requests,
        "blocks": limits.num_blocks,
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "cpu_us_per_step": cpu / run.summary["steps"] * 1e6,
        "cpu_us_per_request": cpu / num_requests * 1e6,
        **{name: run.summary[name] for name in kept},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument(
        "--scaling", action="store_true", help="cost of a step over requests and pool sizes"
    )
    parser.add_argument(
        "--most", type=int, default=100_000, help="largest number of requests for --scaling"
    )
    parser.add_argument(
        "--million", action="store_true", help="memory of a million chat requests (20 minutes)"
    )
    parser.add_argument(
        "--one",
        nargs=4,
        metavar=("WORKLOAD", "REQUESTS", "BLOCKS", "BLOCK_SIZE"),
        help=f"one replay in this process, printed as JSON; WORKLOAD: {', '.join(GROWN)}",
    )
    options = parser.parse_args()
    if options.one is not None:
        workload, *sizes = options.one
        number, blocks, block_size = map(int, sizes)
        limits = SchedulerLimits(num_blocks=blocks, block_size=block_size, max_running=256)
        print(json.dumps(measure_one(workload, number, limits)))
        return
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.simulator " + " ".join(sys.argv[1:]),
        "start_up_s": start_up_seconds(),
        "cases": {},
    }
    print(
        f"{'case':24} {'Mtokens/s':>10} {'requests/s':>11} {'us/step':>8} {'wall s (min..max)':>22}"
    )
    measure(steady(1), "full-kv", fixed_limits(64), 1)  # imports what is imported at first use
    for name, (make, policy, limits) in cases().items():
        figures = measure(make(), policy, limits, options.repeat)
        results["cases"][name] = figures
        wall = figures["wall_s"]
        print(
            f"{name:24} {figures['tokens_per_wall_s'] / 1e6:10.2f} "
            f"{figures['requests_per_wall_s']:11.0f} {figures['us_per_step']:8.1f} "
            f"{wall['median']:7.2f} ({wall['min']:.2f}..{wall['max']:.2f})"
        )
    if options.scaling:
        most = options.most
        numbers = [number for number in (1_000, 10_000, 100_000, 1_000_000) if number <= most]
        results["requests"] = grown("steady", numbers, [4_096])
        results["pool"] = grown("steady", [min(10_000, most)], [512, 4_096, 32_768, 262_144])
    if options.million:
        results["million"] = grown("crowd", [1_000_000], [8_192], block_size=32)
    results["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
