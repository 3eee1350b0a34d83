"""Figures that leave the dashboard: one HTML page without a server, for one view or for whole recordings."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.figures.activity import NUM_BINS, activity_figure, holders_figure
from dashboard.figures.compare import (
    LATENCIES,
    LATENCY_COLUMNS,
    comparison,
    in_words,
    latency_figure,
    strips_figure,
    tradeoff_figure,
    value_of,
)
from dashboard.figures.occupancy import Shown, occupancy_figure
from dashboard.figures.requests import ROWS, gantt, totals_figure
from dashboard.figures.style import CONFIG
from dashboard.load import read_marks
from traces.holding import read_holdings
from traces.occupancy import read_occupancy
from traces.phases import read_phases
from traces.recording import Recording
from traces.series import COLUMNS, step_series

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font-family: system-ui, sans-serif; margin: 24px; max-width: 1500px; }}
table {{ border-collapse: collapse; margin: 8px 0 24px; }}
td, th {{ padding: 3px 12px; text-align: right; border-bottom: 1px solid #80889355; }}
td:first-child, td:nth-child(2) {{ text-align: left; }}
</style></head><body><h1>{title}</h1>{sections}</body></html>
"""


def standalone(title: str, figures: Mapping[str, go.Figure], table: pd.DataFrame | None = None) -> str:
    """One page with a table and figures under their names; the drawing library is in it, once."""
    parts = [] if table is None else [table.to_html(index=False, border=0, na_rep="-")]
    for index, (words, figure) in enumerate(figures.items()):
        drawn = figure.to_html(full_html=False, include_plotlyjs=index == 0, config=CONFIG)
        parts.append(f"<h2>{escape(words)}</h2>{drawn}")
    return HTML.format(title=escape(title), sections="".join(parts))


def run_figures(recording: Recording) -> dict[str, go.Figure]:
    """What the views Occupancy and Requests show of a whole recording. Raises RecordingError."""
    occupancy, holdings = read_occupancy(recording), read_holdings(recording)
    phases, pool = read_phases(recording), (occupancy.num_blocks, occupancy.block_size)
    if not occupancy.times.last_s:
        return {}
    whole = Shown(occupancy.span_s, (0, occupancy.num_blocks))
    series = step_series(recording.table("steps", COLUMNS), occupancy.times, occupancy.span_s, NUM_BINS, pool)
    numbers = np.unique(phases.request)
    longest = numbers[np.argsort(-phases.totals(numbers).sum(axis=1), kind="stable")][:ROWS]
    return {
        "Which block is what": occupancy_figure(occupancy, holdings, read_marks(recording), whole),
        "What the steps did": activity_figure(series, pool),
        "Who holds most": holders_figure(occupancy, holdings, occupancy.span_s),
        f"The {len(longest)} longest requests": gantt(phases, longest, occupancy.span_s),
        "Where the time went": totals_figure(phases, numbers, ""),
    }


def write_report(runs: Sequence[tuple[str, Recording]], path: Path) -> None:
    """Write the figures of recordings, given as (name, recording), as one page; of several also their comparison.

    Raises RecordingError when a recording cannot be read, ValueError without one or when two have the same name.
    """
    names = [name for name, _ in runs]
    if not runs or len(set(names)) != len(names):
        raise ValueError(f"a report needs recordings with different names, not {names}")
    summaries = {name: recording.manifest.get("summary") or {} for name, recording in runs}
    figures: dict[str, go.Figure] = {}
    if len(runs) > 1:
        points = {name: (value_of(s, "ttft_s.p99"), value_of(s, "tokens_per_s")) for name, s in summaries.items()}
        figures["Throughput against the tail"] = tradeoff_figure(points, "time to first token, p99", "s")
        requests = {name: recording.table("requests", LATENCY_COLUMNS) for name, recording in runs}
        figures |= {words.capitalize(): latency_figure(requests, key) for key, (words, _) in LATENCIES.items()}
        figures["The pools"] = strips_figure({name: read_occupancy(recording) for name, recording in runs})
    for name, recording in runs:
        figures |= {f"{name}: {words}": figure for words, figure in run_figures(recording).items()}
    path.write_text(standalone(" | ".join(names), figures, in_words(comparison(summaries))), encoding="utf-8")
