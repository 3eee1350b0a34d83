"""What `/metrics` costs the engine's thread: `python -m benchmarks.metrics_cost [TRACE]`.

The journal and the steps of a simulated run (Qwen3-8B on an H200, hybrid) are counted as the server counts them, a
second of the run at a time; beside it a step of 256 outputs, and what one scrape copies.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from engine.server.histogram import STEP_S, Histogram
from engine.server.lane_samples import _of_times
from engine.server.tally import Tally, TokenGaps
from sim.replay import replay
from traces.formats import read_trace
from traces.recording import TABLES

DEFAULT = "../shared/workloads/W1.jsonl"
REPEATS = 200


def measured(work: Callable[[], object]) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Print the figures."""
    run = replay(read_trace(sys.argv[1] if len(sys.argv) > 1 else DEFAULT), "hybrid")
    events = np.stack([run.events[name].to_numpy().astype(np.int64) for name in TABLES["events"].names], axis=1)
    steps = {name: run.steps[name].to_numpy() for name in run.steps.column_names}
    tally = Tally(40960)
    seconds = steps["end_s"].astype(int)
    start = time.perf_counter()
    for second in range(int(seconds.max()) + 1):
        chosen = seconds == second
        if chosen.any():
            first, last = steps["step"][chosen][[0, -1]]
            low, high = np.searchsorted(events[:, 0], (first, last + 1))
            tally.rows(events[low:high], events[:0, 0])
            tally.take_steps({name: values[chosen] for name, values in steps.items()})
    bulk_s = time.perf_counter() - start
    num_requests, num_steps = run.requests.num_rows, run.steps.num_rows
    print(
        f"{len(events):,} rows, {num_steps:,} steps, {num_requests:,} requests, {run.summary['makespan_s']:,.0f} s of "
        f"run: {bulk_s:.3f} s of counting, {bulk_s / num_steps * 1e6:.2f} us a step, "
        f"{bulk_s / num_requests * 1e6:.0f} us a request, {bulk_s / run.summary['makespan_s']:.4%} of the time"
    )
    numbers = [list(range(256)), list(range(256))]
    gaps, moment = TokenGaps(Histogram(STEP_S)), 0

    def quiet_step() -> None:
        nonlocal moment
        moment += 1
        gaps.step(numbers[moment % 2], moment)

    def mixed_step() -> None:
        nonlocal moment
        moment += 1
        gaps.step(list(range(moment % 2, 256 + moment % 2)), moment)

    print(f"gaps of 256 outputs: {measured(quiet_step) * 1e6:.1f} us a step like the one before, ", end="")
    print(f"{measured(mixed_step) * 1e6:.1f} us a step in which somebody comes or goes")
    print(f"a scrape copies histograms in {measured(lambda: _of_times(tally)) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
