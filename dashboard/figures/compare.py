"""Figures that compare runs: latencies, throughput, pools, sweeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
from plotly.subplots import make_subplots

from zlab.dashboard.figures.occupancy import Shown, overview_picture, picture
from zlab.dashboard.figures.style import finish, plain, rounded, times
from zlab.traces.metrics import end_to_end, time_per_output_token, time_to_first_token
from zlab.traces.occupancy import Occupancy, Overview
from zlab.traces.palette import CYCLE, DASHES, SYMBOLS

CDF_POINTS = 200
MOST_POINTS = 1000  # of a trade-off
MOST_VALUES = 60  # of a swept parameter
LATENCIES = {
    "ttft_s": ("time to first token", time_to_first_token),
    "tpot_s": ("time per output token", time_per_output_token),
    "e2e_s": ("end to end", end_to_end),
}
LATENCY_COLUMNS = ("arrival_s", "first_token_s", "finish_s", "output_tokens", "status")


@dataclass(frozen=True)
class Figure:
    """A row of the comparison: key of the summary, label, unit, and which way is better."""

    key: str
    words: str
    unit: str
    better: int = 0  # 1: more is better, -1: less is better, 0: neither


# Work done: where a policy makes outputs longer, tokens a second rise without more of it.
HEADLINE, SOLVED = "requests_per_s", "solved_per_s"
TABLE = (
    Figure(HEADLINE, "finished requests a second", "1/s", 1),
    Figure(SOLVED, "solved problems a second", "1/s", 1),
    Figure("tokens_per_s", "output tokens a second", "tokens/s", 1),
    Figure("makespan_s", "makespan", "s", -1),
    Figure("seconds_to_90pct", "until 90 % of the output", "s", -1),
    Figure("steps", "steps", ""),
    Figure("ttft_s.p50", "time to first token, p50", "s", -1),
    Figure("ttft_s.p99", "time to first token, p99", "s", -1),
    Figure("tpot_s.p50", "time per output token, p50", "s", -1),
    Figure("tpot_s.p99", "time per output token, p99", "s", -1),
    Figure("e2e_s.p99", "end to end, p99", "s", -1),
    Figure("preemptions", "preemptions", "", -1),
    Figure("recomputed_tokens", "recomputed tokens", "tokens", -1),
    Figure("compressions", "compressions", ""),
    Figure("prefix_hit_tokens", "prefix hits", "tokens"),
    Figure("running_mean", "running on average", "requests"),
    Figure("occupancy_mean", "pool in use on average", "pool share"),
    Figure("wasted_slots_mean", "unused slots in owned blocks", "pool share", -1),
    Figure("requests_refused", "refused", "requests", -1),
)


def value_of(summary: Mapping[str, Any], key: str) -> float | None:
    """Return a figure of a summary, None where it is missing. `a.b` is entry b of distribution
    a.
    """
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    try:
        return float(found) if isinstance(found, int | float) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table with a row for each figure and a column for each run.

    Each run after the first also gets its difference from the first, in per cent.
    """
    names = list(summaries)
    rows: list[dict[str, Any]] = []
    for figure in TABLE:
        values = {name: value_of(summaries[name], figure.key) for name in names}
        if figure.key == SOLVED and not any(values.values()):
            continue  # no accuracy is known
        row: dict[str, Any] = {"figure": figure.words, "unit": figure.unit} | dict(values)
        base = values[names[0]]
        for name in names[1:]:
            other = values[name]
            known = base is not None and other is not None and base != 0
            row[f"{name} vs {names[0]}, %"] = (
                (other / base - 1) * 100 if known and base and other is not None else None
            )
        rows.append(row)
    return pd.DataFrame(rows)


BETTER, WORSE = "▲", "▼"
ALIKE_PCT = 1.0  # differences up to this are neither better nor worse


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return the comparison with its numbers as text, and marks at differences: BETTER or WORSE."""
    better = {figure.words: figure.better for figure in TABLE}
    shown = table.copy()
    for name in table.columns[2:]:
        if not str(name).endswith(", %"):
            shown[name] = [_number(value, "{:,.4g}") for value in table[name]]
            continue
        shown[name] = [
            _number(value, "{:+.1f}") + _mark(value * better.get(words, 0))
            for words, value in zip(table["figure"], table[name], strict=True)
        ]
    return shown


def _number(value: float, shape: str) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else shape.format(value)


def _mark(gain_pct: float) -> str:
    if pd.isna(gain_pct) or abs(gain_pct) <= ALIKE_PCT:
        return ""
    return f" {BETTER if gain_pct > 0 else WORSE}"


def cdf(values: Any) -> tuple[list[float | None], list[float]]:
    """Return (value, share of requests at or below it) at CDF_POINTS even shares, extremes
    included.
    """
    known = np.sort(np.asarray(values)[~np.isnan(values)])
    if not len(known):
        return [], []
    shares = np.linspace(0, 1, min(CDF_POINTS, max(len(known), 2)))
    return rounded(np.quantile(known, shares)), [round(float(share), 4) for share in shares]


def latency_figure(requests: Mapping[str, pa.Table], key: str) -> go.Figure:
    """Draw the distribution of a latency, one line for each run."""
    words, measure = LATENCIES[key]
    figure = go.Figure()
    for index, (label, table) in enumerate(requests.items()):
        name = plain(label)
        x, y = cdf(measure(table))
        line = {"color": CYCLE[index % len(CYCLE)], "dash": DASHES[index % len(DASHES)], "width": 2}
        tip = f"{name}: %{{y:.0%}} within %{{x}} s<extra></extra>"
        figure.add_trace(
            go.Scatter(x=x, y=y, name=name, mode="lines", line=line, hovertemplate=tip)
        )
    figure.update_xaxes(ticksuffix=" s", rangemode="tozero")
    figure.update_yaxes(title_text="share of requests", tickformat=".0%", range=[0, 1.01])
    finish(figure, 340, words.capitalize())
    figure.update_layout(legend={"y": -0.25})
    return figure


def pareto_edge(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of points (cost, gain) that no other point beats in both, by rising cost."""
    best, edge = -np.inf, []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            edge.append(index)
    return edge


def tradeoff_figure(
    points: Mapping[str, tuple[float | None, float | None]], words: str, unit: str
) -> go.Figure:
    """Draw tokens per second against a latency's p99; a line joins the Pareto-optimal runs."""
    known = [
        (plain(name), x, y) for name, (x, y) in points.items() if x is not None and y is not None
    ][:1000]
    figure = go.Figure()
    edge = pareto_edge([(x, y) for _, x, y in known])
    line = {"color": "#808893", "dash": "dot", "shape": "hv"}
    where = ([known[i][1] for i in edge], [known[i][2] for i in edge])
    figure.add_trace(
        go.Scatter(
            x=where[0], y=where[1], mode="lines", line=line, name="Pareto edge", hoverinfo="skip"
        )
    )
    for index, (name, x, y) in enumerate(known):
        figure.add_trace(
            go.Scatter(
                x=[x],
                y=[y],
                name=name,
                mode="markers+text" if len(known) <= 12 else "markers",
                text=[name],
                textposition=("top center", "bottom center", "top left", "bottom left")[index % 4],
                marker={
                    "size": 12,
                    "color": CYCLE[index % len(CYCLE)],
                    "symbol": SYMBOLS[index % len(SYMBOLS)],
                },
                hovertemplate=(
                    f"{name}<br>%{{x:.4g}} {unit}<br>%{{y:,.4g}} requests/s<extra></extra>"
                ),
                showlegend=False,
            )
        )
    low, high = (pick((x for _, x, _ in known), default=0.0) for pick in (min, max))
    room = 0.25 * (high - low) or 0.25 * abs(high) or 1.0  # for the names beside the points
    figure.update_xaxes(
        title_text=f"{words}, {unit}  (less is better)", range=[low - room, high + room]
    )
    figure.update_yaxes(title_text="finished requests/s  (more is better)")
    finish(figure, 400, "Throughput against the tail")
    beside_title = {"x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"}
    return figure.update_layout(legend=beside_title)


@dataclass(frozen=True)
class Strip:
    """A whole run's pool as a picture (data URI), with the end of its last step and its blocks."""

    picture: str
    last_s: float
    num_blocks: int


def strip_of(pool: Occupancy | Overview) -> Strip:
    """Return the picture of a whole run, "" of one without steps."""
    last_s = pool.last_s if isinstance(pool, Overview) else pool.times.last_s
    if not last_s:
        return Strip("", 0.0, pool.num_blocks)
    if isinstance(pool, Overview):
        return Strip(overview_picture(pool), last_s, pool.num_blocks)
    shown = Shown(pool.span_s, (0, pool.num_blocks))
    return Strip(picture(pool, shown, "state", None), last_s, pool.num_blocks)


def strips_figure(pools: Mapping[str, Strip]) -> go.Figure:
    """Draw the pools of several runs below each other on one time axis."""
    until = max((pool.last_s for pool in pools.values()), default=0.0) or 1.0
    titles = [f"{plain(name)} ({pool.last_s:,.1f} s)" for name, pool in pools.items()]
    figure = make_subplots(
        rows=len(pools), cols=1, shared_xaxes=True, vertical_spacing=0.25 / len(pools)
    )
    for row, (title, pool) in enumerate(zip(titles, pools.values(), strict=True), 1):
        if not pool.last_s:
            continue
        figure.add_layout_image(
            source=pool.picture,
            xref="x" if row == 1 else f"x{row}",
            yref="y" if row == 1 else f"y{row}",
            x=0,
            y=0,
            sizex=pool.last_s,
            sizey=pool.num_blocks,
            sizing="stretch",
            layer="below",
        )
        at = times([0.0, pool.last_s], (0.0, until))
        figure.add_trace(
            go.Scatter(x=at, y=[0, pool.num_blocks], mode="markers", opacity=0, showlegend=False),
            row,
            1,
        )
        figure.update_yaxes(range=[pool.num_blocks, 0], title_text="block", row=row, col=1)
        figure.add_annotation(
            text=title,
            xref="paper",
            yref=f"y{row if row > 1 else ''} domain",
            x=0,
            y=1.0,
            yanchor="bottom",
            showarrow=False,
        )
    figure.update_xaxes(range=[0, until])
    figure.update_xaxes(ticksuffix=" s")
    return finish(figure, 90 + 150 * len(pools))


def sweep_map(rows: pd.DataFrame, x: str, y: str, value: str) -> go.Figure:
    """Draw a figure over two swept parameters, averaged over all others.

    A gap marks a point that failed or was not run.
    """
    for name in (x, y):  # before the table of all pairs is made
        rows = rows[rows[name].isin(rows[name].drop_duplicates().sort_values()[:MOST_VALUES])]
    cells = rows.pivot_table(index=y, columns=x, values=value, aggfunc="mean", dropna=False)
    x, y, value = plain(x), plain(y), plain(value)
    figure = go.Figure(
        go.Heatmap(
            x=[plain(name) for name in cells.columns],
            y=[plain(name) for name in cells.index],
            z=[rounded(row) for row in cells.to_numpy(dtype=float)],
            colorscale="Cividis",
            texttemplate="%{z:.4g}" if cells.size <= 200 else None,
            hovertemplate=f"{x} %{{x}}, {y} %{{y}}<br>{value} %{{z:.4g}}<extra></extra>",
            colorbar={"title": value},
        )
    )
    figure.update_xaxes(title_text=x, type="category")
    figure.update_yaxes(title_text=y, type="category")
    return finish(figure, 420, f"{value} over {x} and {y}")
