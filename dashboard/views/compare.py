"""Runs side by side, and sweeps as maps."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import streamlit as st

from dashboard import cache
from dashboard.export import standalone
from dashboard.figures.compare import (
    LATENCIES,
    comparison,
    in_words,
    latency_figure,
    strips_figure,
    sweep_map,
    tradeoff_figure,
    value_of,
)
from dashboard.load import Source, find_sweeps, read_sweep
from dashboard.views.page import draw, told
from traces.recording import RecordingError

MOST = 6  # recordings side by side
TAILS = {
    "ttft_s.p99": "time to first token, p99",
    "tpot_s.p99": "time per output token, p99",
    "e2e_s.p99": "end to end, p99",
}


def show(sources: list[Source], roots: list[Path]) -> None:
    """Draw the view of several recordings, and of sweeps found beside them."""
    labels = [source.label for source in sources]
    chosen = st.multiselect(
        "Recordings (differences are to the first)",
        labels,
        default=labels[: min(3, len(labels))],
        max_selections=MOST,
        key="runs",
        bind="query-params",
    )
    by_label = {source.label: source for source in sources}
    readable = _readable([by_label[label] for label in chosen if label in by_label])
    if readable:
        with told("The comparison"):
            _side_by_side(readable)
    else:
        st.info("Choose at least one recording that has come to its end.")
    st.divider()
    _sweeps(roots)


def _readable(sources: list[Source]) -> dict[str, str]:
    """Folders by label; what cannot be read or is not finished is said and left out."""
    folders = {}
    for source in sources:
        try:
            if cache.summary(source.folder):
                folders[source.label] = source.folder
            else:
                st.warning(f"{source.label} has no figures yet: it is still being written, or was cut off.")
        except RecordingError as error:
            st.error(f"**{source.label}** is left out. {error}")
    return folders


def _side_by_side(folders: Mapping[str, str]) -> None:
    summaries = {label: cache.summary(folder) for label, folder in folders.items()}
    table = comparison(summaries)
    st.dataframe(in_words(table), hide_index=True, height=38 + 35 * len(table))
    words = st.selectbox("Tail", list(TAILS), format_func=TAILS.__getitem__, key="tail", bind="query-params")
    points = {label: (value_of(s, str(words)), value_of(s, "tokens_per_s")) for label, s in summaries.items()}
    scatter = tradeoff_figure(points, TAILS[str(words)], "s")
    draw(scatter, "tradeoff", "Throughput against the chosen tail, with the Pareto edge")
    figures = {"Throughput against the tail": scatter}
    requests = {label: cache.latencies(folder) for label, folder in folders.items()}
    for column, (key, (name, _)) in zip(st.columns(len(LATENCIES)), LATENCIES.items(), strict=True):
        figures[name] = latency_figure(requests, key)
        with column:
            draw(figures[name], f"cdf-{key}", f"Share of requests by {name}")
    st.subheader("The pools", anchor=False)
    figures["The pools"] = strips_figure({label: cache.occupancy(folder) for label, folder in folders.items()})
    draw(figures["The pools"], "strips", "Block states over time, a strip a run")
    left, right, _ = st.columns([1, 1, 3])
    csv = table.to_csv(index=False).encode()
    left.download_button("Table (CSV)", csv, "comparison.csv", "text/csv", on_click="ignore")

    def page() -> bytes:
        return standalone("Comparison", figures).encode()

    right.download_button("Figures (HTML)", page, "comparison.html", "text/html", on_click="ignore")


def _sweeps(roots: list[Path]) -> None:
    st.subheader("Sweeps", anchor=False)
    found = find_sweeps(roots)
    if not found:
        st.caption(
            "No sweep was found. Make one: `zlab sweep TRACE --grid budget.tokens=1024,2048 --grid kv-blocks=256,512 "
            "--out runs/sweep.csv`."
        )
        return
    path = st.selectbox("Sweep", [str(path) for path in found], key="sweep")
    with told(str(path)):
        rows, parameters, figures = read_sweep(Path(str(path)))
        if not figures:
            st.warning("Every point of this sweep failed: see the column `error` below.")
            st.dataframe(rows, hide_index=True)
            return
        _sweep(rows, parameters, figures)


def _sweep(rows: pd.DataFrame, parameters: list[str], figures: list[str]) -> None:
    columns = st.columns(3)
    across = columns[0].selectbox("Across", parameters, key="sweep_x")
    others = [name for name in parameters if name != across] or parameters
    up = columns[1].selectbox("Up", others, key="sweep_y")
    start = figures.index("tokens_per_s") if "tokens_per_s" in figures else 0
    value = columns[2].selectbox("Figure", figures, index=start, key="sweep_value")
    if across == up:
        rows = rows.assign(**{" ": ""})
        up = " "
    draw(sweep_map(rows, str(across), str(up), str(value)), "sweep-map", "A figure over two swept parameters")
    if "ttft_s_p99" in rows and "tokens_per_s" in rows:
        points = {
            ", ".join(f"{name} {row[name]}" for name in parameters): (row["ttft_s_p99"], row["tokens_per_s"])
            for row in rows.dropna(subset=["ttft_s_p99", "tokens_per_s"]).to_dict("records")
        }
        draw(tradeoff_figure(points, "time to first token, p99", "s"), "sweep-edge", "All points with the Pareto edge")
    st.dataframe(rows.head(2000), hide_index=True)
