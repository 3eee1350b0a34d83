"""What became of every request: phases as bars, a table to sort and filter, one request's story."""

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import cache
from dashboard.figures.requests import ROWS, gantt, pick_rows, totals_figure
from dashboard.load import Source
from dashboard.views.page import draw, draw_to_zoom, exports, number_from_url, told, window_of, zoom_fields
from traces.phases import PHASES, Phases

ORDERS = {
    "arrival": ("number", True),
    "longest end to end": ("e2e_s", False),
    "longest wait for the first token": ("ttft_s", False),
    "longest in line": ("queued_s", False),
    "longest blocked": ("blocked_s", False),
    "longest preempted": ("preempted_s", False),
    "most preemptions": ("preemptions", False),
    "most compressions": ("compressions", False),
    "longest prompt": ("prompt_tokens", False),
    "longest output": ("output_tokens", False),
}
MOST_ROWS = 2_000  # of the table that are sent
TABLE = (
    "number", "id", "status", "reason", "prompt_tokens", "output_tokens", "arrival_s", "ttft_s", "e2e_s",
    *(f"{phase}_s" for phase in PHASES), "preemptions", "compressions", "prefix_hit_tokens", "recomputed_tokens",
)  # fmt: skip


def show(source: Source) -> None:
    """Draw the view of one recording."""
    with told(source.label):
        with st.spinner("Reading what became of the requests …"):
            phases, frame = cache.phases(source.folder), cache.requests(source.folder)
        if not len(phases.request):
            st.info("No request has been recorded yet. Open the view **Live** to follow the run as it is written.")
            return
        _draw(source, phases, frame)


def _draw(source: Source, phases: Phases, frame: pd.DataFrame) -> None:
    chosen, numbers = _choose(frame, phases)
    if not len(numbers):
        st.warning("No request is left: loosen the filters above.")
        return
    zoom_fields(with_blocks=False)
    window = window_of(float(phases.end_s.max()))
    pages = -(-len(numbers) // ROWS)
    page = st.number_input(
        f"Page (of {pages}, {ROWS} requests each)", 1, max(pages, 1), 1, key="page", bind="query-params"
    )
    rows = pick_rows(numbers, (int(page) - 1) * ROWS)
    request = st.session_state.get("request")
    figure = gantt(phases, rows, window, request)
    st.caption("A row is a request, a bar a phase of its life. **Draw a box to zoom in on a time.**")
    draw_to_zoom(figure, "gantt", (window, tuple(rows.tolist()), request), "Phases of requests over time")
    totals = totals_figure(phases, numbers, f"Where the time of {len(numbers):,} requests went")
    draw(totals, "totals", "Time in each phase, all requests together")
    _story(source, frame, phases)
    st.subheader("All figures", anchor=False)
    if len(chosen) > MOST_ROWS:
        st.caption(f"The first {MOST_ROWS:,} of {len(chosen):,} requests in this order; the export has all.")
    st.dataframe(chosen[list(TABLE)].head(MOST_ROWS), hide_index=True, height=320)
    exports(source.folder, {"Phases": figure, "Where the time went": totals}, {"requests": chosen})


def _choose(frame: pd.DataFrame, phases: Phases) -> tuple[pd.DataFrame, Any]:
    """Requests in the chosen order under the chosen filters, as rows and as numbers.

    A run that is still going on may have written no request down yet: then the phases say which there are.
    """
    columns = st.columns([1.4, 1.2, 1, 1], vertical_alignment="bottom")
    with columns[0]:
        order = st.selectbox("Order", list(ORDERS), key="order", bind="query-params")
    with columns[1]:
        had = st.selectbox("That were", ["anything", *PHASES], key="had", bind="query-params", format_func=_phase_words)
    with columns[2]:
        states = sorted(frame["status"].unique())
        status = st.selectbox("Ended", ["any way", *states], key="ended")
    with columns[3]:
        text = st.text_input("Id, session or class contains", key="text", bind="query-params")
    if frame.empty:
        return frame, np.unique(phases.request)
    key, ascending = ORDERS[str(order)]
    kept = frame
    if had != "anything":
        kept = kept[kept[f"{had}_s"] > 0]
    if status != "any way":
        kept = kept[kept["status"] == status]
    if text:
        columns_searched = [kept[name].astype("string").fillna("") for name in ("id", "session", "cls")]
        kept = kept[np.logical_or.reduce([c.str.contains(text, regex=False) for c in columns_searched])]
    kept = kept.sort_values([key, "number"], ascending=[ascending, True], na_position="last", kind="stable")
    return kept, kept["number"].to_numpy()


def _phase_words(name: str) -> str:
    return name.replace("_", " ")


def _story(source: Source, frame: pd.DataFrame, phases: Phases) -> None:
    st.subheader("One request's story", anchor=False)
    number = number_from_url("Request", "request", 0, True, "Its number: the 17 of r17")
    if number is None:
        st.caption("Enter a number (the 17 of r17) to read what it waited for, behind whom, and what it cost.")
        return
    row = frame[frame["number"] == int(number)]
    if row.empty:
        st.warning(f"There is no ended request r{int(number)} in this recording; there are {len(frame):,}.")
        return
    lines = cache.story(source.folder).tell(row.iloc[0].to_dict())
    st.markdown("\n".join(f"- **{line.time_s:,.3f} s** {line.words}" for line in lines[:200]))
    if len(lines) > 200:
        st.caption(f"… and {len(lines) - 200} more.")
    own = totals_figure(phases, np.array([int(number)]), f"Where the time of r{int(number)} went")
    draw(own, "own", "Time of the request in each phase")
