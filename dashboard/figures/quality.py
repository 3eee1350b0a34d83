"""Answers kept under compression: accuracy against budget, one line a scorer."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from zlab.dashboard.figures.style import INK, finish

HEIGHT = 460


def accuracy_figure(results: Mapping[str, Any]) -> go.Figure:
    """Pass@1 of every compared column against its budget, with 95 % intervals.

    Args:
        results: what `zlab evaluate` writes as `results.json`.

    Returns:
        One line for each scorer and temperature, and a level line for each baseline.
    """
    figure = go.Figure()
    lines: dict[str, list[Mapping[str, Any]]] = {}
    several = len({one["temperature"] for one in results["columns"]}) > 1
    for column in results["columns"]:
        if column["of_baseline"] is None:
            figure.add_hline(
                y=100 * column["pass_at_1"],
                line={"color": INK, "dash": "dot", "width": 1},
                annotation_text=column["name"],
                annotation_position="bottom right",
            )
        elif column["budget_tokens"] is not None:
            name = column["scorer"]
            if several:
                name += f" @ {column['temperature']:g}"
            lines.setdefault(name, []).append(column)
    for name, columns in lines.items():
        columns.sort(key=lambda one: float(one["budget_tokens"]))
        values = [100 * one["pass_at_1"] for one in columns]
        low, high = zip(*(one["pass_at_1_interval"] for one in columns), strict=True)
        figure.add_scatter(
            x=[one["budget_tokens"] for one in columns],
            y=values,
            name=name,
            mode="lines+markers",
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [100 * top - value for top, value in zip(high, values, strict=True)],
                "arrayminus": [value - 100 * low for low, value in zip(low, values, strict=True)],
                "thickness": 1,
                "width": 3,
            },
            hovertemplate="%{y:.1f} % at %{x} tokens<extra>" + name + "</extra>",
        )
    problems = sum(one["problems"] for one in results["data"])
    names = ", ".join(one["name"] for one in results["data"])
    figure.update_xaxes(title="kept tokens", rangemode="tozero")
    figure.update_yaxes(title="pass@1, %", range=[0, 103])
    return finish(figure, HEIGHT, f"{problems:,} problems of {names}, 95 % intervals")
