"""Measure how fast a large recording opens and zooms: `python -m benchmarks.dashboard`.

The recording has 20,000 requests, 100,000 steps and 4,096 blocks (820,000 events, 4.2 million block
changes), as in `tests/dashboard/test_scale.py`. "Open" is the first draw of a view with the files
in the system's cache: reading, replaying, drawing, JSON. "Zoom" draws another part of the same
recording. Times are medians, because the machine is shared.

`--run FOLDER` measures the view Occupancy on a recording of your own in a fresh process: CPU
seconds from the start of the process to the first picture, imports included, and of a second draw.
The results in `dashboard_large.json` are of the recording that this command makes:

    zlab replay 'synth:chat?num_requests=20000&arrivals=poisson:25' --gpu l40s --model qwen3-8b
        --policy hybrid --kv-blocks 4096 --block-size 16 --out FOLDER
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

from tests.dashboard.large_recording import write_large
from zlab.dashboard.figures.activity import (
    NUM_BINS,
    activity_figure,
    gantt,
    holders_figure,
    pick_rows,
    totals_figure,
)
from zlab.dashboard.figures.occupancy import (
    Shown,
    occupancy_figure,
    overview_picture,
    picture,
    read_marks,
)
from zlab.dashboard.figures.style import num_bytes, num_marks
from zlab.traces.occupancy import OVERVIEW_FILE, Overview, read_occupancy
from zlab.traces.recording import Recording
from zlab.traces.timeline import COLUMNS, read_holdings, read_phases, step_series


def timed(what: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Return (median seconds, the last result)."""
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
    parser.add_argument("--run", type=Path, help="measure this recording instead of a made one")
    arguments = parser.parse_args()
    if arguments.run is not None:
        report(first_picture(Recording(arguments.run)), arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = write_large(Path(folder) / "run")
        recording = Recording(Path(folder) / "run")
        results = measure(recording, arguments.repeat)
    report(results | {"rows": rows}, arguments.out)


def report(results: dict[str, Any], out: Path | None) -> None:
    """Print the results with machine and date, and write them."""
    results |= {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(results, indent=2))
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


def first_picture(recording: Recording) -> dict[str, Any]:
    """Return CPU seconds to the first picture of a recording, of drawing it again, and of Compare's
    strip with and without the overview that is kept beside it.
    """
    imported = time.process_time()
    occupancy = read_occupancy(recording)
    replayed = time.process_time()
    holdings, marks = read_holdings(recording), read_marks(recording)
    steps = recording.table("steps", COLUMNS)
    pool = (occupancy.num_blocks, occupancy.block_size)
    whole = Shown(occupancy.span_s, (0, occupancy.num_blocks))

    def draw() -> float:
        started = time.process_time()
        series = step_series(steps, occupancy.times, whole.window_s, NUM_BINS, pool)
        figures = (
            occupancy_figure(occupancy, holdings, marks, whole),
            activity_figure(series, pool),
            holders_figure(occupancy, whole.window_s),
        )
        for figure in figures:
            figure.to_json()
        return time.process_time() - started

    first = draw()
    drawn_at = time.process_time()
    again = min(draw() for _ in range(3))
    started = time.process_time()
    picture(occupancy, whole, "state", None)
    redraw = time.process_time() - started
    found: dict[str, Any] = {
        "blocks": occupancy.num_blocks,
        "lives": len(occupancy.lives),
        "imports_cpu_s": imported,
        "replay_cpu_s": replayed - imported,
        "first_draw_cpu_s": first,
        "first_picture_cpu_s": drawn_at,
        "whole_view_again_cpu_s": again,
        "picture_of_states_again_cpu_s": redraw,
    }
    if occupancy.overview is not None and occupancy.overview.save(recording):
        started = time.process_time()
        kept = Overview.load(recording)
        assert kept is not None
        overview_picture(kept)
        found["strip_from_overview_cpu_s"] = time.process_time() - started
        found["overview_bytes"] = (recording.folder / OVERVIEW_FILE).stat().st_size
    return found


def measure(recording: Recording, repeat: int) -> dict[str, Any]:
    """Return seconds, marks and bytes of the two largest views."""
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
            holders_figure(occupancy, window),
        ]

    results: dict[str, Any] = {"replay_blocks_s": read, "read_holdings_s": more}
    whole = (0, occupancy.num_blocks)
    for name, window, blocks in (
        ("whole run", occupancy.span_s, whole),
        ("20 s of all blocks", (400.0, 420.0), whole),
        ("2 s of 40 blocks", (400.0, 402.0), (1000, 1040)),
    ):
        seconds, figures = timed(partial(view, window, blocks), repeat)
        results[f"occupancy, {name}"] = drawn(seconds, figures)
    read, phases = timed(lambda: read_phases(recording), repeat)
    numbers = np.arange(20_000)
    seconds, figures = timed(
        lambda: [
            gantt(phases, pick_rows(numbers, 0), occupancy.span_s),
            totals_figure(phases, numbers, ""),
        ],
        repeat,
    )
    return results | {"read_phases_s": read, "requests, first page": drawn(seconds, figures)}


def drawn(seconds: float, figures: list[go.Figure]) -> dict[str, Any]:
    """Return the time, the marks and the bytes of some figures."""
    return {
        "draw_s": seconds,
        "most_marks_a_figure": max(num_marks(figure) for figure in figures),
        "bytes": sum(num_bytes(figure) for figure in figures),
    }


if __name__ == "__main__":
    main()
