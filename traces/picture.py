"""Block occupancy of one or several runs as one HTML page that needs no server, no library and no network.

For each run, on one time axis: which block is in which state (a picture), how many blocks are in each state, how many
requests run and wait, and where requests were preempted and compressed.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from traces.detail import count_marks, fullest_counts
from traces.moments import event_times, read_names
from traces.occupancy import CACHED, FREE, Occupancy, read_occupancy
from traces.palette import BLOCK_LOOKS, darker
from traces.picture_page import MARKUP, SCRIPT, STYLE
from traces.picture_svg import NUM_BINS, DrawnRun, legend, panel, patterns
from traces.recording import Recording
from traces.series import COLUMNS, step_series


def write_occupancy_html(runs: Sequence[tuple[str, Recording]], path: Path) -> None:
    """Write the page for runs given as (name, recording), side by side on a common time axis.

    Raises RecordingError when a recording cannot be read, ValueError without runs.
    """
    if not runs:
        raise ValueError("there is no run to draw: give at least one (name, recording)")
    replayed = [(name, recording, read_occupancy(recording)) for name, recording in runs]
    until = max(occupancy.times.last_s for _, _, occupancy in replayed) or 1.0
    binned = [_bin(name, recording, occupancy, (0.0, until)) for name, recording, occupancy in replayed]
    most = max(int(max(run.series.peaks[key].max() for key in ("running", "waiting"))) for run in binned)
    panels = "\n".join(panel(run, until, max(most, 1)) for run in binned)
    page = MARKUP.format(
        title=escape(" | ".join(run.name for run in binned)),
        style=STYLE,
        script=SCRIPT,
        panels=panels,
        legend=legend(),
        looks=json.dumps([[look.words, look.colour, darker(look.colour)] for look in BLOCK_LOOKS.values()]),
        patterns=patterns(),
    )
    path.write_text(page, encoding="utf-8")


def _bin(name: str, recording: Recording, occupancy: Occupancy, window_s: tuple[float, float]) -> DrawnRun:
    names = read_names(recording.manifest)
    events = recording.table("events", ("step", "kind", "request"))
    moments, kind = event_times(events, occupancy.times, names), events["kind"].to_numpy()
    series = step_series(
        recording.table("steps", COLUMNS),
        occupancy.times,
        window_s,
        NUM_BINS,
        (occupancy.num_blocks, occupancy.block_size),
    )
    marks = {
        "preemption": count_marks(moments[kind == names.kinds.get("preempted")], window_s, NUM_BINS),
        "compression": count_marks(moments[kind == names.kinds.get("compressing")], window_s, NUM_BINS),
    }
    counts = fullest_counts(occupancy, window_s, NUM_BINS)[1]
    over = series.edges_s[:-1] >= occupancy.times.last_s  # the run has ended before the page's last one
    counts[over] = 0
    marks["full"] = ((counts[:, FREE] + counts[:, CACHED] == 0) & ~over).astype(np.int64)
    summary = recording.manifest.get("summary")
    return DrawnRun(
        name, occupancy, series, counts, marks, summary if isinstance(summary, dict) else {}, recording.complete
    )
