"""How fast does a large recording open and zoom? `python -m benchmarks.dashboard_speed [--repeat 3] [--out FILE]`.

20,000 requests x 100,000 steps x 4,096 blocks (820,000 events, 4.2 million block changes), as in
`tests/dashboard/test_scale.py`. "Open" is what the first look at a view costs after the files are in the system's
cache: reading, replaying, drawing, JSON. "Zoom" draws another part of what has been read. Medians: a shared machine.
"""

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.figures.activity import NUM_BINS, activity_figure, holders_figure
from dashboard.figures.occupancy import Shown, occupancy_figure
from dashboard.figures.requests import gantt, pick_rows, totals_figure
from dashboard.figures.style import num_bytes, num_marks
from dashboard.load import read_marks
from tests.dashboard.large_recording import write_large
from traces.holding import read_holdings
from traces.occupancy import read_occupancy
from traces.phases import read_phases
from traces.recording import Recording
from traces.series import COLUMNS, step_series


def timed(what: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """(median seconds, the last result)."""
    seconds, result = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        result = what()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = write_large(Path(folder) / "run")
        recording = Recording(Path(folder) / "run")
        results = measure(recording, arguments.repeat)
    results |= {
        "rows": rows,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    results["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(results, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


def measure(recording: Recording, repeat: int) -> dict[str, Any]:
    """Seconds, marks and bytes of the two views that show most."""
    read, occupancy = timed(lambda: read_occupancy(recording), repeat)
    more, holdings = timed(lambda: read_holdings(recording), repeat)
    marks = read_marks(recording)
    steps = recording.table("steps", COLUMNS)
    pool = (occupancy.num_blocks, occupancy.block_size)

    def view(window: tuple[float, float], blocks: tuple[int, int]) -> list[go.Figure]:
        series = step_series(steps, occupancy.times, window, NUM_BINS, pool)
        return [
            occupancy_figure(occupancy, holdings, marks, Shown(window, blocks)),
            activity_figure(series, pool),
            holders_figure(occupancy, holdings, window),
        ]

    results: dict[str, Any] = {"replay_blocks_s": read, "read_holdings_s": more}
    whole = (0, occupancy.num_blocks)
    for name, window, blocks in (
        ("whole run", occupancy.span_s, whole),
        ("20 s of all blocks", (400.0, 420.0), whole),
        ("2 s of 40 blocks", (400.0, 402.0), (1000, 1040)),
    ):
        seconds, figures = timed(partial(view, window, blocks), repeat)
        results[f"occupancy, {name}"] = told(seconds, figures)
    read, phases = timed(lambda: read_phases(recording), repeat)
    numbers = np.arange(20_000)
    seconds, figures = timed(
        lambda: [gantt(phases, pick_rows(numbers, 0), occupancy.span_s), totals_figure(phases, numbers, "")], repeat
    )
    return results | {"read_phases_s": read, "requests, first page": told(seconds, figures)}


def told(seconds: float, figures: list[go.Figure]) -> dict[str, Any]:
    """What drawing some figures took and what they are."""
    return {
        "draw_s": seconds,
        "most_marks_a_figure": max(num_marks(figure) for figure in figures),
        "bytes": sum(num_bytes(figure) for figure in figures),
    }


if __name__ == "__main__":
    main()
