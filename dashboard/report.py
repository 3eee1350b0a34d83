"""Write figures as one HTML page that needs no server."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from zlab.dashboard.figures.activity import (
    NUM_BINS,
    ROWS,
    activity_figure,
    gantt,
    holders_figure,
    totals_figure,
)
from zlab.dashboard.figures.compare import (
    HEADLINE,
    LATENCIES,
    LATENCY_COLUMNS,
    comparison,
    in_words,
    latency_figure,
    strip_of,
    strips_figure,
    tradeoff_figure,
    value_of,
)
from zlab.dashboard.figures.occupancy import Shown, occupancy_figure, read_marks
from zlab.dashboard.figures.style import CONFIG
from zlab.traces.occupancy import read_occupancy
from zlab.traces.recording import Recording
from zlab.traces.timeline import COLUMNS, read_holdings, read_phases, step_series

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font-family: system-ui, sans-serif; margin: 24px; max-width: 1500px; }}
table {{ border-collapse: collapse; margin: 8px 0 24px; }}
td, th {{ padding: 3px 12px; text-align: right; border-bottom: 1px solid #80889355; }}
td:first-child, td:nth-child(2) {{ text-align: left; }}
.xtick text, .ytick text, .gtitle, .xtitle, .ytitle, .legendtext, .annotation-text
  {{ fill: CanvasText !important; }}
</style></head><body><h1>{title}</h1>{sections}</body></html>
"""


def standalone(
    title: str, figures: Mapping[str, go.Figure], table: pd.DataFrame | None = None
) -> str:
    """Return a page with a table and titled figures. The page contains the drawing library once."""
    parts = [] if table is None else [table.to_html(index=False, border=0, na_rep="-")]
    for index, (words, figure) in enumerate(figures.items()):
        drawn = figure.to_html(full_html=False, include_plotlyjs=index == 0, config=CONFIG)
        parts.append(f"<h2>{escape(words)}</h2>{drawn}")
    return HTML.format(title=escape(title), sections="".join(parts))


def write_occupancy(runs: Sequence[tuple[str, Recording]], path: Path) -> None:
    """Write the block picture of each named recording as one page, all on one time axis.

    Raises RecordingError when a recording cannot be read, ValueError without one.
    """
    if not runs:
        raise ValueError("there is no run to draw: give at least one (name, recording)")
    read = {name: (recording, read_occupancy(recording)) for name, recording in runs}
    until = max(occupancy.times.last_s for _, occupancy in read.values()) or 1.0
    figures: dict[str, go.Figure] = {}
    for name, (recording, occupancy) in read.items():
        if not occupancy.times.last_s:
            continue
        whole = Shown(occupancy.span_s, (0, occupancy.num_blocks))
        figure = occupancy_figure(occupancy, read_holdings(recording), read_marks(recording), whole)
        title = name if recording.complete else f"{name} (the run has not come to its end)"
        figures[title] = figure.update_xaxes(range=[0.0, until])
    path.write_text(standalone("Block occupancy: " + " | ".join(read), figures), encoding="utf-8")


def run_figures(recording: Recording) -> dict[str, go.Figure]:
    """Return the figures of the views Occupancy and Requests for a whole recording, by title.

    Raises RecordingError when the recording cannot be read.
    """
    occupancy, holdings = read_occupancy(recording), read_holdings(recording)
    phases, pool = read_phases(recording), (occupancy.num_blocks, occupancy.block_size)
    if not occupancy.times.last_s:
        return {}
    whole = Shown(occupancy.span_s, (0, occupancy.num_blocks))
    series = step_series(
        recording.table("steps", COLUMNS), occupancy.times, occupancy.span_s, NUM_BINS, pool
    )
    numbers = np.unique(phases.request)
    longest = numbers[np.argsort(-phases.totals(numbers).sum(axis=1), kind="stable")][:ROWS]
    return {
        "Which block is what": occupancy_figure(occupancy, holdings, read_marks(recording), whole),
        "What the steps did": activity_figure(series, pool),
        "Who holds most": holders_figure(occupancy, occupancy.span_s),
        f"The {len(longest)} longest requests": gantt(phases, longest, occupancy.span_s),
        "Where the time went": totals_figure(phases, numbers, ""),
    }


def write_report(runs: Sequence[tuple[str, Recording]], path: Path) -> None:
    """Write the figures of named recordings as one page; several recordings are also compared.

    Raises RecordingError when a recording cannot be read, ValueError when there is none or when two
    have the same name.
    """
    names = [name for name, _ in runs]
    if not runs or len(set(names)) != len(names):
        raise ValueError(f"a report needs recordings with different names, not {names}")
    summaries = {name: recording.manifest.get("summary") or {} for name, recording in runs}
    figures: dict[str, go.Figure] = {}
    if len(runs) > 1:
        points = {
            name: (value_of(s, "ttft_s.p99"), value_of(s, HEADLINE))
            for name, s in summaries.items()
        }
        figures["Throughput against the tail"] = tradeoff_figure(
            points, "time to first token, p99", "s"
        )
        requests = {name: recording.table("requests", LATENCY_COLUMNS) for name, recording in runs}
        figures |= {
            words.capitalize(): latency_figure(requests, key)
            for key, (words, _) in LATENCIES.items()
        }
        figures["The pools"] = strips_figure(
            {name: strip_of(read_occupancy(recording)) for name, recording in runs}
        )
    for name, recording in runs:
        figures |= {f"{name}: {words}": figure for words, figure in run_figures(recording).items()}
    path.write_text(
        standalone(" | ".join(names), figures, in_words(comparison(summaries))), encoding="utf-8"
    )
