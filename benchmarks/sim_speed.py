"""How fast is the simulator? `python -m benchmarks.sim_speed [--repeat 5] [--out FILE] [--scaling] [--million]`.

End to end means: a workload in memory goes in, a complete recording on disk comes out (one process, recording on). The
start of the interpreter and imports are measured apart. Repeats are reported as median and range, in wall seconds and
in seconds of CPU: this is a shared machine, compare ratios within one run.
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

from policies.core.limits import Limits
from sim.replay import replay
from traces.arrivals import Poisson
from traces.formats import read_trace
from traces.synthetic import ChatShape, chat, fixed
from traces.workload import Workload

RATE = 4.0  # new chat sessions a second: the card keeps up, the line does not grow without bound
SHARED = Path(__file__).resolve().parents[2] / "shared"
REASONING = Limits(num_blocks=512, block_size=256, max_batched_tokens=16384, max_running=256)


def fixed_limits(num_blocks: int) -> Limits:
    """Pool and bounds of workload FIX."""
    return Limits(num_blocks=num_blocks, block_size=16, max_batched_tokens=8192, max_running=128)


def cases() -> dict[str, tuple[Callable[[], Workload], str, Limits]]:
    """Name -> (workload, policy, limits)."""
    found: dict[str, tuple[Callable[[], Workload], str, Limits]] = {
        "FIX roomy, full-kv": (lambda: fixed(4000, 512, 1024, 20.0, 1), "full-kv", fixed_limits(20_000)),
        "FIX tight, full-kv": (lambda: fixed(4000, 512, 1024, 20.0, 1), "full-kv", fixed_limits(4_000)),
        "FIX roomy, hybrid": (lambda: fixed(4000, 512, 1024, 20.0, 1), "hybrid", fixed_limits(20_000)),
        "FIX tight, hybrid": (lambda: fixed(4000, 512, 1024, 20.0, 1), "hybrid", fixed_limits(4_000)),
    }
    path = SHARED / "workloads" / "W1.jsonl"
    if path.is_file():
        for policy in ("full-kv", "hybrid"):
            found[f"W1, {policy}"] = (lambda: read_trace(path), policy, REASONING)
    else:
        print(f"W1 left out: {path} is missing", file=sys.stderr)
    return found


def measure(workload: Workload, policy: str, limits: Limits, repeat: int) -> dict[str, Any]:
    """Replay with a recording `repeat` times."""
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
        "cpu_s": {"median": statistics.median(busy), "min": min(busy), "max": max(busy), "repeat": repeat},
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
    """Interpreter, imports and a replay of one request (which imports the rest), in a process of their own."""
    start = time.perf_counter()
    one = "from sim.replay import replay; from traces.synthetic import fixed; replay(fixed(1, 16, 1, 1.0, 1)).summary"
    subprocess.run([sys.executable, "-c", one], check=True)
    return time.perf_counter() - start


def crowd(num_requests: int) -> Workload:
    """Synthetic chat with much block churn: many short turns with growing prefixes."""
    return chat(num_requests, ChatShape(), Poisson(RATE), seed=7)


CHILD = """
import json, resource, shutil, sys, tempfile, time
from pathlib import Path
from benchmarks.sim_speed import Limits, crowd, replay, steady
make, number, blocks = {"crowd": crowd, "steady": steady}[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
load, folder = make(number), tempfile.mkdtemp()
replay(steady(1), "full-kv").summary  # imports what is left to import
start, start_cpu = time.perf_counter(), time.process_time()
limits = Limits(num_blocks=blocks, block_size=int(sys.argv[4]), max_running=256)
run = replay(load, "full-kv", limits=limits, out=Path(folder) / "run")
wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
shutil.rmtree(folder)
keys = ("steps", "output_tokens", "requests_finished", "requests_refused", "preemptions", "running_mean")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps({"workload": sys.argv[1], "requests": number, "blocks": blocks, "wall_s": wall, "cpu_s": cpu,
    "peak_gb": peak, "cpu_us_per_step": cpu / run.summary["steps"] * 1e6, "cpu_us_per_request": cpu / number * 1e6}
    | {key: run.summary[key] for key in keys}))
"""


def steady(num_requests: int) -> Workload:
    """The same load however long it lasts: small requests at a rate the card keeps up with."""
    return fixed(num_requests, 128, 64, 40.0, 1)


def grown(workload: str, requests: list[int], blocks: list[int], block_size: int = 16) -> list[dict[str, Any]]:
    """One replay a number of requests and pool size, each in a process of its own (peak memory is a process's)."""
    rows = []
    for number in requests:
        for pool in blocks:
            command = [sys.executable, "-c", CHILD, workload, str(number), str(pool), str(block_size)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--scaling", action="store_true", help="cost of a step over numbers of requests and pool sizes")
    parser.add_argument("--most", type=int, default=100_000, help="largest number of requests for --scaling")
    parser.add_argument("--million", action="store_true", help="a million chat requests: memory (about 20 minutes)")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.sim_speed " + " ".join(sys.argv[1:]),
        "start_up_s": start_up_seconds(),
        "cases": {},
    }
    print(f"{'case':24} {'Mtokens/s':>10} {'requests/s':>11} {'us/step':>8} {'wall s (min..max)':>22}")
    measure(steady(1), "full-kv", fixed_limits(64), 1)  # what is imported at first use is no part of any case
    for name, (make, policy, limits) in cases().items():
        figures = measure(make(), policy, limits, options.repeat)
        results["cases"][name] = figures
        wall = figures["wall_s"]
        print(
            f"{name:24} {figures['tokens_per_wall_s'] / 1e6:10.2f} {figures['requests_per_wall_s']:11.0f} "
            f"{figures['us_per_step']:8.1f} {wall['median']:7.2f} ({wall['min']:.2f}..{wall['max']:.2f})"
        )
    if options.scaling:
        numbers = [number for number in (1_000, 10_000, 100_000, 1_000_000) if number <= options.most]
        results["requests"] = grown("steady", numbers, [4_096])
        results["pool"] = grown("steady", [min(10_000, options.most)], [512, 4_096, 32_768, 262_144])
    if options.million:
        results["million"] = grown("crowd", [1_000_000], [8_192], block_size=32)
    results["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
