"""The view Compare: several recordings, and sweeps as maps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot, Source, find_sweeps, read_sweep
from zlab.dashboard.figures.compare import (
    BETTER,
    HEADLINE,
    LATENCIES,
    WORSE,
    comparison,
    in_words,
    latency_figure,
    strips_figure,
    sweep_map,
    tradeoff_figure,
    value_of,
)
from zlab.dashboard.report import standalone
from zlab.dashboard.views.identity import identity, key_of, settings_table, unlike
from zlab.dashboard.views.page import (
    as_code,
    csv_of,
    draw,
    error_in_words,
    escaped,
    name_dropped_rows,
)
from zlab.traces.recording import Recording, RecordingError

T = TypeVar("T")
MOST, FEW = 6, 3  # recordings side by side; at first
TAILS = {
    "ttft_s.p99": "time to first token, p99",
    "tpot_s.p99": "time per output token, p99",
    "e2e_s.p99": "end to end, p99",
}


def show(sources: list[Source], roots: list[Path]) -> None:
    """Draw the comparison of several recordings, and of the sweeps found beside them."""
    labels = [source.label for source in sources]
    if "runs" not in st.session_state and "runs" not in st.query_params:
        st.session_state["runs"] = newest_comparable(sources)
    asked = st.session_state.get("runs") or st.query_params.get_all("runs")
    gone = [label for label in asked if label not in labels]
    if gone:
        st.error(f"There is no recording {', '.join(map(as_code, gone))} here.")
        st.session_state["runs"] = [label for label in asked if label in labels]
    chosen = st.multiselect(
        "Recordings (differences are to the first)",
        labels,
        max_selections=MOST,
        key="runs",
        bind="query-params",
    )
    by_label = {source.label: source for source in sources}
    readable = _readable([by_label[label] for label in chosen if label in by_label])
    if readable:
        with error_in_words("The comparison"):
            _side_by_side(readable)
    else:
        st.info("Choose at least one recording that has come to its end.")
    st.divider()
    _sweeps(roots)


def newest_comparable(sources: Sequence[Source]) -> list[str]:
    """Return the newest recordings of one workload, GPU, model and pool, at most FEW.

    `sources` come newest first. Where no two are comparable, it is the newest alone.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for source in sources:
        try:
            manifest = Recording(source.folder).manifest
        except RecordingError:
            continue
        if manifest.get("summary"):
            groups.setdefault(key_of(manifest), []).append(source.label)
    several = [group for group in groups.values() if len(group) > 1]
    return next(iter(several or groups.values()), [])[:FEW]


def _readable(sources: list[Source]) -> dict[str, Snapshot]:
    """Return the recordings by label. Broken and unfinished ones are named and left out."""
    found = {}
    for source in sources:
        try:
            snapshot = Snapshot(source.folder)
            if snapshot.summary:
                found[source.label] = snapshot
            else:
                st.warning(
                    f"{escaped(source.label)} has no figures yet: it is still being written, or "
                    f"was cut off."
                )
        except RecordingError as error:
            st.error(f"**{escaped(source.label)}** is left out. {escaped(error)}")
    return found


def _side_by_side(snapshots: Mapping[str, Snapshot]) -> None:
    summaries = {label: snapshot.summary for label, snapshot in snapshots.items()}
    manifests = {label: snapshot.recording.manifest for label, snapshot in snapshots.items()}
    differ = unlike(manifests)
    if differ:
        st.warning(
            f"**These runs differ in {', '.join(differ)}.** So differences between them are not "
            f"those of their policies."
        )
    for words in headline(summaries):
        st.markdown(words)
    table = comparison(summaries)
    st.dataframe(in_words(table), hide_index=True, height=38 + 35 * len(table))
    st.caption(
        f"{BETTER} better than the first run, {WORSE} worse; no mark: neither, or within 1 %."
    )
    st.download_button(
        "Table (CSV)", csv_of(table), "comparison.csv", "text/csv", on_click="ignore"
    )
    with st.expander("What the runs are, and the settings that differ", expanded=bool(differ)):
        identities = pd.DataFrame({label: identity(found) for label, found in manifests.items()})
        st.dataframe(identities.fillna("-"))
        settings, equal = settings_table(manifests)
        st.dataframe(settings, hide_index=True, height=min(38 + 35 * max(len(settings), 1), 400))
        st.caption(f"{equal:,} other settings are equal.")
    name_dropped_rows(snapshots)
    figures = _figures(snapshots, summaries)

    def page() -> bytes:
        return standalone("Comparison", figures, in_words(table)).encode()

    st.download_button("Figures (HTML)", page, "comparison.html", "text/html", on_click="ignore")


def headline(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say in a sentence for each later run how much more work it does than the first."""
    (first, base), *others = (
        (label, value_of(summary, HEADLINE)) for label, summary in summaries.items()
    )
    found = []
    for label, value in others:
        if base and value is not None:
            change = value / base - 1
            found.append(
                f"{escaped(label)} finishes **{value:,.3g} requests/s**, {escaped(first)} "
                f"{base:,.3g}: **{abs(change):.1%} {'more' if change >= 0 else 'fewer'}**."
            )
    return found


def _figures(
    snapshots: Mapping[str, Snapshot], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, go.Figure]:
    """Draw the figures; a recording whose tables are broken is named and left out of some."""
    words = st.selectbox(
        "Tail", list(TAILS), format_func=TAILS.__getitem__, key="tail", bind="query-params"
    )
    points = {
        label: (value_of(s, str(words)), value_of(s, HEADLINE)) for label, s in summaries.items()
    }
    scatter = tradeoff_figure(points, TAILS[str(words)], "s")
    draw(scatter, "tradeoff", "Throughput against the chosen tail, with the Pareto edge")
    figures = {"Throughput against the tail": scatter}
    requests = _of_each(snapshots, data.latencies)
    for column, (key, (name, _)) in zip(st.columns(len(LATENCIES)), LATENCIES.items(), strict=True):
        figures[name] = latency_figure(requests, key)
        with column:
            draw(figures[name], f"cdf-{key}", f"Share of requests by {name}")
    st.subheader("The pools", anchor=False)
    pools = _of_each(snapshots, data.strip)
    if pools:
        figures["The pools"] = strips_figure(pools)
        draw(figures["The pools"], "strips", "Block states over time, a strip a run")
    return figures


def _of_each(snapshots: Mapping[str, Snapshot], read: Callable[[Snapshot], T]) -> dict[str, T]:
    """Read something of each recording; one that is broken is named and left out."""
    found = {}
    for label, snapshot in snapshots.items():
        with error_in_words(label):
            found[label] = read(snapshot)
    return found


def _sweeps(roots: list[Path]) -> None:
    st.subheader("Sweeps", anchor=False)
    found = find_sweeps(roots)
    if not found:
        st.caption(
            "No sweep was found. Make one: `zlab sweep TRACE --grid budget.tokens=1024,2048 "
            "--grid kv-blocks=256,512 "
            "--out runs/sweep.csv`."
        )
        return
    path = st.selectbox("Sweep", [str(path) for path in found], key="sweep")
    with error_in_words(str(path)):
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
    start = figures.index(HEADLINE) if HEADLINE in figures else 0
    value = columns[2].selectbox("Figure", figures, index=start, key="sweep_value")
    if across == up:
        rows = rows.assign(**{" ": ""})
        up = " "
    draw(
        sweep_map(rows, str(across), str(up), str(value)),
        "sweep-map",
        "A figure over two swept parameters",
    )
    if "ttft_s_p99" in rows and HEADLINE in rows:
        points = {
            ", ".join(f"{name} {row[name]}" for name in parameters): (
                row["ttft_s_p99"],
                row[HEADLINE],
            )
            for row in rows.dropna(subset=["ttft_s_p99", HEADLINE]).to_dict("records")
        }
        draw(
            tradeoff_figure(points, "time to first token, p99", "s"),
            "sweep-edge",
            "All points with the Pareto edge",
        )
    st.dataframe(rows.head(2000), hide_index=True)
