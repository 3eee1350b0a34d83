"""Figures that compare a predicted and a measured run: first different decision, errors of
times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa

from zlab.dashboard.figures.style import INK, finish, rounded
from zlab.traces.recording import Difference
from zlab.traces.schema import EventKind
from zlab.traces.timeline import FloatArray, Names

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
NUM_POINTS = 2_000
AROUND = 4  # rows before and after the first that differs


@dataclass(frozen=True)
class StepErrors:
    """Steps on which both runs decided alike: durations in seconds and the prediction's error."""

    step: FloatArray
    predicted_s: FloatArray
    measured_s: FloatArray

    @property
    def relative(self) -> FloatArray:
        """Error of each step relative to its measured time."""
        measured = np.where(self.measured_s > 0, self.measured_s, np.nan)
        return np.asarray((self.predicted_s - self.measured_s) / measured)

    @property
    def total(self) -> float | None:
        """Relative error of the sum of all steps; None without steps."""
        measured = float(self.measured_s.sum())
        return float(self.predicted_s.sum()) / measured - 1 if measured > 0 else None


def step_errors(
    predicted: pa.Table, measured: pa.Table, difference: Difference | None
) -> StepErrors:
    """Compare two `steps` tables (start_s, end_s) up to the step in which decisions differ."""
    count = min(predicted.num_rows, measured.num_rows)
    if difference is not None:
        count = min(count, difference.step)
    lengths = [
        (table["end_s"].to_numpy() - table["start_s"].to_numpy())[:count].astype(np.float64)
        for table in (predicted, measured)
    ]
    return StepErrors(np.arange(count, dtype=np.float64), *lengths)


def error_table(errors: StepErrors) -> pd.DataFrame:
    """Return percentiles of predicted and measured step times and of the absolute errors."""
    if not len(errors.step):
        return pd.DataFrame()
    sizes = np.abs(errors.relative)
    sizes = sizes[~np.isnan(sizes)]
    rows = []
    for mark in PERCENTILES:
        predicted, measured = (
            float(np.percentile(v, mark)) for v in (errors.predicted_s, errors.measured_s)
        )
        rows.append(
            {
                "percentile": f"p{mark}",
                "predicted, ms": predicted * 1e3,
                "measured, ms": measured * 1e3,
                "difference, %": (predicted / measured - 1) * 100 if measured > 0 else None,
                "size of a step's error, %": float(np.percentile(sizes, mark)) * 100
                if len(sizes)
                else None,
            }
        )
    return pd.DataFrame(rows)


def times_figure(errors: StepErrors) -> go.Figure:
    """Draw predicted against measured step times, at most NUM_POINTS steps, extremes included."""
    at = _spread_out(errors)
    measured, predicted = errors.measured_s[at] * 1e3, errors.predicted_s[at] * 1e3
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=rounded(measured),
            y=rounded(predicted),
            customdata=errors.step[at].astype(int).tolist(),
            mode="markers",
            marker={"size": 5, "color": "#0072b2", "opacity": 0.55},
            name="a step",
            hovertemplate="step %{customdata}<br>measured %{x} ms<br>predicted %{y} "
            "ms<extra></extra>",
        )
    )
    if len(at):
        most = float(max(measured.max(), predicted.max()))
        line = {"color": INK, "dash": "dash"}
        figure.add_trace(
            go.Scatter(
                x=[0, most], y=[0, most], mode="lines", line=line, name="equal", hoverinfo="skip"
            )
        )
    figure.update_xaxes(title_text="measured step time, ms", rangemode="tozero")
    figure.update_yaxes(title_text="predicted step time, ms", rangemode="tozero")
    return finish(figure, 420, "Step times")


def error_figure(errors: StepErrors) -> go.Figure:
    """Draw the error over the run, and the share of steps below each error."""
    at = _spread_out(errors)
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=errors.step[at].astype(int).tolist(),
            y=rounded(errors.relative[at] * 100),
            mode="markers",
            marker={
                "size": 4,
                "color": "#d55e00",
                "symbol": "x-thin",
                "line": {"width": 1, "color": "#d55e00"},
            },
            name="error of a step",
            hovertemplate="step %{x}: %{y} %<extra></extra>",
        )
    )
    figure.add_hline(y=0, line={"color": INK, "dash": "dash"})
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="predicted over measured, %")
    return finish(figure, 420, "Error of each step")


def _spread_out(errors: StepErrors) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Return at most NUM_POINTS indices: evenly spaced steps and those with the largest errors."""
    count = len(errors.step)
    if count <= NUM_POINTS:
        return np.arange(count)
    worst = np.argsort(-np.nan_to_num(np.abs(errors.relative)))[: NUM_POINTS // 4]
    others = np.setdiff1d(np.arange(count), worst)
    even = others[np.linspace(0, len(others) - 1, NUM_POINTS - len(worst)).astype(np.intp)]
    return np.sort(np.concatenate((worst, even)))


def around(events: pa.Table, manifest: Mapping[str, Any], index: int) -> pd.DataFrame:
    """Return the events before and after row `index`, with the names of their kinds."""
    first = max(0, index - AROUND)
    part = events.slice(first, 2 * AROUND + 1)
    table = part.to_pandas()
    table["kind"] = [
        EventKind(kind).label if kind else f"unknown ({code})"
        for kind, code in zip(Names(manifest).kinds(part), table["kind"], strict=True)
    ]
    table.insert(0, "row", np.arange(first, first + len(table)))
    table.insert(1, "", ["→ differs" if row == index else "" for row in table["row"]])
    return table
