"""Runs side by side: latencies, throughput against the tail, pools as strips, sweeps as maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
from plotly.subplots import make_subplots

from dashboard.figures.occupancy import Shown, picture
from dashboard.figures.style import finish, rounded, times
from traces.metrics import end_to_end, time_per_output_token, time_to_first_token
from traces.occupancy import Occupancy
from traces.palette import CYCLE, DASHES, SYMBOLS

CDF_POINTS = 200
LATENCIES = {
    "ttft_s": ("time to first token", time_to_first_token),
    "tpot_s": ("time per output token", time_per_output_token),
    "e2e_s": ("end to end", end_to_end),
}
LATENCY_COLUMNS = ("arrival_s", "first_token_s", "finish_s", "output_tokens", "status")


@dataclass(frozen=True)
class Figure:
    """A row of the table: key of the summary, words, unit."""

    key: str
    words: str
    unit: str


TABLE = (
    Figure("tokens_per_s", "output tokens a second", "tokens/s"),
    Figure("requests_per_s", "requests a second", "1/s"),
    Figure("makespan_s", "makespan", "s"),
    Figure("seconds_to_90pct", "until 90 % of the output", "s"),
    Figure("steps", "steps", ""),
    Figure("ttft_s.p50", "time to first token, p50", "s"),
    Figure("ttft_s.p99", "time to first token, p99", "s"),
    Figure("tpot_s.p50", "time per output token, p50", "s"),
    Figure("tpot_s.p99", "time per output token, p99", "s"),
    Figure("e2e_s.p99", "end to end, p99", "s"),
    Figure("preemptions", "preemptions", ""),
    Figure("recomputed_tokens", "recomputed tokens", "tokens"),
    Figure("compressions", "compressions", ""),
    Figure("prefix_hit_tokens", "prefix hits", "tokens"),
    Figure("running_mean", "running on average", "requests"),
    Figure("occupancy_mean", "pool in use on average", "pool share"),
    Figure("wasted_slots_mean", "unused slots in owned blocks", "pool share"),
    Figure("requests_refused", "refused", "requests"),
)


def value_of(summary: Mapping[str, Any], key: str) -> float | None:
    """A figure of a summary; `a.b` is b of a's distribution. None if it is not there."""
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row a figure, a column a run, and for every run after the first its difference from it in per cent."""
    names = list(summaries)
    rows: list[dict[str, Any]] = []
    for figure in TABLE:
        values = {name: value_of(summaries[name], figure.key) for name in names}
        row: dict[str, Any] = {"figure": figure.words, "unit": figure.unit} | dict(values)
        base = values[names[0]]
        for name in names[1:]:
            other = values[name]
            known = base is not None and other is not None and base != 0
            row[f"{name} vs {names[0]}, %"] = (other / base - 1) * 100 if known and base and other is not None else None
        rows.append(row)
    return pd.DataFrame(rows)


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """The comparison with its numbers as a reader wants them."""
    shown = table.copy()
    for name in table.columns[2:]:
        shape = "{:+.1f}" if str(name).endswith(", %") else "{:,.4g}"
        shown[name] = [
            "-" if pd.isna(value) else f"{value:,.0f}" if abs(value) >= 1000 else shape.format(value)
            for value in table[name]
        ]
    return shown


def cdf(values: Any) -> tuple[list[float | None], list[float]]:
    """(value, share of requests at or below it) at CDF_POINTS even shares; the smallest and largest are among them."""
    known = np.sort(np.asarray(values)[~np.isnan(values)])
    if not len(known):
        return [], []
    shares = np.linspace(0, 1, min(CDF_POINTS, max(len(known), 2)))
    return rounded(np.quantile(known, shares)), [round(float(share), 4) for share in shares]


def latency_figure(requests: Mapping[str, pa.Table], key: str) -> go.Figure:
    """Shares of requests that had at most a latency, a line a run."""
    words, measure = LATENCIES[key]
    figure = go.Figure()
    for index, (name, table) in enumerate(requests.items()):
        x, y = cdf(measure(table))
        line = {"color": CYCLE[index % len(CYCLE)], "dash": DASHES[index % len(DASHES)], "width": 2}
        tip = f"{name}: %{{y:.0%}} within %{{x}} s<extra></extra>"
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines", line=line, hovertemplate=tip))
    figure.update_xaxes(title_text=f"{words}, seconds", rangemode="tozero")
    figure.update_yaxes(title_text="share of requests", tickformat=".0%", range=[0, 1.01])
    finish(figure, 340, words.capitalize())
    figure.update_layout(legend={"y": -0.25})
    return figure


def pareto_edge(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points (cost, gain) that no other point beats in both, by rising cost."""
    best, edge = -np.inf, []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            edge.append(index)
    return edge


def tradeoff_figure(points: Mapping[str, tuple[float | None, float | None]], words: str, unit: str) -> go.Figure:
    """Tokens a second against a latency's p99 (latency, tokens/s); the edge joins runs that none beats in both."""
    known = [(name, x, y) for name, (x, y) in points.items() if x is not None and y is not None][:1000]
    figure = go.Figure()
    edge = pareto_edge([(x, y) for _, x, y in known])
    line = {"color": "#808893", "dash": "dot", "shape": "hv"}
    where = ([known[i][1] for i in edge], [known[i][2] for i in edge])
    figure.add_trace(go.Scatter(x=where[0], y=where[1], mode="lines", line=line, name="Pareto edge", hoverinfo="skip"))
    for index, (name, x, y) in enumerate(known):
        figure.add_trace(
            go.Scatter(
                x=[x],
                y=[y],
                name=name,
                mode="markers+text" if len(known) <= 12 else "markers",
                text=[name],
                textposition=("top center", "bottom center", "top left", "bottom left")[index % 4],
                marker={"size": 12, "color": CYCLE[index % len(CYCLE)], "symbol": SYMBOLS[index % len(SYMBOLS)]},
                hovertemplate=f"{name}<br>%{{x:.4g}} {unit}<br>%{{y:,.0f}} tokens/s<extra></extra>",
                showlegend=False,
            )
        )
    figure.update_xaxes(title_text=f"{words}, {unit}  (less is better)")
    figure.update_yaxes(title_text="output tokens/s  (more is better)")
    finish(figure, 400, "Throughput against the tail")
    return figure


def strips_figure(pools: Mapping[str, Occupancy]) -> go.Figure:
    """Pools below each other on a common time axis."""
    until = max((pool.times.last_s for pool in pools.values()), default=0.0) or 1.0
    titles = [f"{name} ({pool.times.last_s:,.1f} s)" for name, pool in pools.items()]
    figure = make_subplots(rows=len(pools), cols=1, shared_xaxes=True, vertical_spacing=0.25 / len(pools))
    for row, (title, pool) in enumerate(zip(titles, pools.values(), strict=True), 1):
        if not pool.times.last_s:
            continue
        figure.add_layout_image(
            source=picture(pool, Shown(pool.span_s, (0, pool.num_blocks)), "state", None),
            xref="x" if row == 1 else f"x{row}",
            yref="y" if row == 1 else f"y{row}",
            x=0,
            y=0,
            sizex=pool.times.last_s,
            sizey=pool.num_blocks,
            sizing="stretch",
            layer="below",
        )
        at = times([0.0, pool.times.last_s], (0.0, until))
        figure.add_trace(go.Scatter(x=at, y=[0, pool.num_blocks], mode="markers", opacity=0, showlegend=False), row, 1)
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
    figure.update_xaxes(title_text="seconds since the start", row=len(pools), col=1)
    return finish(figure, 90 + 150 * len(pools))


def sweep_map(rows: pd.DataFrame, x: str, y: str, value: str) -> go.Figure:
    """A map of a figure over two swept parameters; others are averaged over; a gap failed or was not run."""
    cells = rows.pivot_table(index=y, columns=x, values=value, aggfunc="mean", dropna=False).iloc[:60, :60]
    figure = go.Figure(
        go.Heatmap(
            x=[str(name) for name in cells.columns],
            y=[str(name) for name in cells.index],
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
