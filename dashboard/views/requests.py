"""The view Requests: phases as bars, a table to sort and filter, one request explained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot, Source
from zlab.dashboard.figures.activity import (
    OVER_TIME,
    ROWS,
    endings,
    gantt,
    latencies_figure,
    pick_rows,
    totals_figure,
)
from zlab.dashboard.figures.compare import HEADLINE, value_of
from zlab.dashboard.views.desk import desk, known_desk
from zlab.dashboard.views.jobs import PlayJob, RunRequest, new_folder, progress_of
from zlab.dashboard.views.navigation import (
    MIN_SPAN,
    area_panel,
    go_to_row,
    open_row,
    step_panel,
)
from zlab.dashboard.views.page import (
    draw,
    draw_to_zoom,
    error_in_words,
    escaped,
    exports,
    header,
    mark_figure,
    number_from_url,
    window_of,
    zoom_fields,
)
from zlab.policies.core.plan import SchedulerError
from zlab.policies.spec import PolicyError, load_policy, presets
from zlab.sim.recorded_run import recorded_policy, what_if
from zlab.sim.specs import SimError
from zlab.traces.schema import PHASES, Phase
from zlab.traces.timeline import Phases
from zlab.traces.workload import TraceError

ORDERS = {
    "arrival": ("number", True),
    "longest end to end": ("e2e_s", False),
    "longest wait for the first token": ("ttft_s", False),
    "longest in line": ("queued_s", False),
    "longest blocked": ("blocked_s", False),
    "longest waited": ("waited_s", False),  # in the queue, blocked, paused or preempted
    "longest preempted": ("away_s", False),  # to be recomputed or swapped
    "most preempted": ("away_s", False),
    "most preemptions": ("preemptions", False),
    "most compressions": ("compressions", False),
    "longest prompt": ("prompt_tokens", False),
    "longest output": ("output_tokens", False),
}
MOST_ROWS = 2_000  # rows of the table that are sent
TABLE = (
    "number",
    "id",
    "status",
    "reason",
    "prompt_tokens",
    "output_tokens",
    "arrival_s",
    "ttft_s",
    "e2e_s",
    *(f"{phase}_s" for phase in PHASES),
    "preemptions",
    "compressions",
    "prefix_hit_tokens",
    "recomputed_tokens",
)


def show(source: Source, root: Path) -> None:
    """Draw the view of one recording; what is simulated from here goes below `root`."""
    with error_in_words(source.label):
        with st.spinner("Reading what became of the requests …"):
            snapshot = Snapshot(source.folder)
            phases, frame = data.phases(snapshot), data.requests(snapshot)
        header(source.label, snapshot)
        if not len(phases.request):
            st.info(
                "No request has been recorded yet. Open the view **Live** to follow the run as "
                "it is written."
            )
            return
        _draw(snapshot, phases, frame, root)


def _draw(snapshot: Snapshot, phases: Phases, frame: pd.DataFrame, root: Path) -> None:
    last_s = float(phases.end_s.max())
    window = window_of(last_s)
    chosen, numbers = _choose(frame, phases, window if window != (0.0, last_s) else None)
    zoom_fields(with_blocks=False, last_s=last_s)
    step_panel(snapshot, last_s)
    area_panel(snapshot, window)
    if not len(numbers):
        st.warning("No request is left: loosen the filters above, or show more of the time.")
        return
    pages = -(-len(numbers) // ROWS)
    page = st.number_input(
        f"Page (of {pages}, {ROWS} requests each)",
        1,
        max(pages, 1),
        1,
        key="page",
        bind="query-params",
    )
    rows = pick_rows(numbers, (int(page) - 1) * ROWS)
    request = st.session_state.get("request")
    figure = gantt(phases, rows, window, request)
    mark_figure(figure, snapshot, window)
    st.caption(
        "A row is a request, a bar a phase of its life. **Click a bar to read why, draw a box to "
        "zoom in on a time.**"
    )
    draw_to_zoom(
        figure,
        "gantt",
        (window, tuple(rows.tolist()), request),
        "Phases of requests over time",
        opens=True,
    )
    totals = totals_figure(phases, numbers, f"Where the time of {len(numbers):,} requests went")
    draw(totals, "totals", "Time in each phase, all requests together")
    explanation(snapshot, root)
    st.subheader("All figures", anchor=False)
    if len(chosen) > MOST_ROWS:
        st.caption(
            f"The first {MOST_ROWS:,} of {len(chosen):,} requests in this order; the export "
            f"has all."
        )
    shown = chosen[list(TABLE)].head(MOST_ROWS)
    st.dataframe(
        shown,
        hide_index=True,
        height=320,
        key="all-requests",
        on_select=open_row("all-requests", shown["number"].tolist()),
        selection_mode="single-row",
    )
    figures = {"Phases": figure, "Where the time went": totals}
    figures |= _latencies(snapshot, chosen, window)
    exports(snapshot.folder, figures, {"requests": chosen})


def _latencies(
    snapshot: Snapshot, chosen: pd.DataFrame, window: tuple[float, float]
) -> dict[str, go.Figure]:
    """Draw latencies over time beside their goals, the prefix hit rate, and how requests ended."""
    st.subheader("Latencies over time", anchor=False)
    columns = st.columns(len(OVER_TIME))
    goals = {}
    for column, (key, (words, _, name)) in zip(columns, OVER_TIME.items(), strict=True):
        with column:
            goal = number_from_url(
                f"Goal: {words}, s", f"goal_{key}", 0.0, False, "Drawn as a line in the figure"
            )
            goals[key] = goal
            known = chosen[name].dropna()
            if goal is not None and len(known):
                st.caption(f"{(known <= goal).mean():.1%} of {len(known):,} requests meet it.")
    figure = latencies_figure(chosen, window, goals)
    mark_figure(figure, snapshot, window)
    words = "Percentiles of latencies and the prefix hit rate over time"
    draw_to_zoom(figure, "latencies", (window, tuple(goals.values())), words)
    st.caption("How these requests ended")
    st.dataframe(endings(chosen), hide_index=True)
    return {"Latencies over time": figure}


def _choose(
    frame: pd.DataFrame, phases: Phases, window_s: tuple[float, float] | None
) -> tuple[pd.DataFrame, Any]:
    """Return the filtered and ordered requests, as rows and as numbers.

    Of a part of the time, only the requests are left that lived in it. A run in progress may have
    written no request yet; then the phases name the requests.
    """
    columns = st.columns([1.4, 1.2, 1, 1], vertical_alignment="bottom")
    with columns[0]:
        order = st.selectbox("Order", list(ORDERS), key="order", bind="query-params")
    with columns[1]:
        had = st.selectbox(
            "That were",
            ["anything", *PHASES],
            key="had",
            bind="query-params",
            format_func=_phase_words,
        )
    with columns[2]:
        states = sorted(frame["status"].unique())
        status = st.selectbox("Ended", ["any way", *states], key="ended")
    with columns[3]:
        text = st.text_input("Id, session or class contains", key="text", bind="query-params")
    if frame.empty:
        return frame, np.unique(phases.request)
    key, ascending = ORDERS[str(order)]
    kept = frame if window_s is None else alive_in(frame, window_s)
    if had != "anything":
        kept = kept[kept[f"{had}_s"] > 0]
    if status != "any way":
        kept = kept[kept["status"] == status]
    if text:
        columns_searched = [
            kept[name].astype("string").fillna("") for name in ("id", "session", "cls")
        ]
        kept = kept[
            np.logical_or.reduce([c.str.contains(text, regex=False) for c in columns_searched])
        ]
    kept = kept.sort_values(
        [key, "number"], ascending=[ascending, True], na_position="last", kind="stable"
    )
    return kept, kept["number"].to_numpy()


def alive_in(frame: pd.DataFrame, window_s: tuple[float, float]) -> pd.DataFrame:
    """Return the requests that were there in a window of time: they arrived before its end and had
    not ended at its start.
    """
    ended = frame["finish_s"].fillna(np.inf)
    return frame[(frame["arrival_s"] <= window_s[1]) & (ended >= window_s[0])]


def _phase_words(name: str) -> str:
    return name.replace("_", " ")


def explanation(snapshot: Snapshot, root: Path, with_field: bool = True) -> None:
    """Explain the request that the address names: its phases, the cause of each event, and how it
    goes under another policy.

    Args:
        snapshot: The recording.
        root: Simulations under another policy go below this folder.
        with_field: Draw the field in which its number is entered; else another one is there.
    """
    st.subheader("One request explained", anchor=False)
    if with_field:
        number_from_url("Request", "request", 0, True, "Its number: the 17 of r17")
    number = st.session_state.get("request")
    if number is None:
        st.caption(
            "Click a bar, a block or a row, or enter a number (the 17 of r17), to read what the "
            "request waited for, behind whom, and what it cost."
        )
        return
    frame, phases = data.requests(snapshot), data.phases(snapshot)
    row = frame[frame["number"] == int(number)]
    if row.empty:
        st.warning(
            f"There is no ended request r{int(number)} in this recording; there are {len(frame):,}."
        )
        return
    asked = row.iloc[0].to_dict()
    explainer = data.explainer(snapshot)
    st.markdown(f"**{escaped(explainer.in_short(asked))}**")
    lines = explainer.explain(asked)
    mine = phases.of(np.array([int(number)]))
    if len(mine.request):
        own_window = (float(mine.start_s.min()), max(float(mine.end_s.max()), MIN_SPAN))
        lifeline = gantt(phases, np.array([int(number)]), own_window, None)
        mark_figure(lifeline, snapshot, own_window)
        draw_to_zoom(lifeline, "lifeline", (own_window, number), "Phases of the request over time")
    events = pd.DataFrame(
        {
            "at, s": [line.time_s for line in lines],
            "step": [line.step if line.step >= 0 else None for line in lines],
            "what happened, and why": [line.words for line in lines],
        }
    )
    st.caption("Select an event to move the cursor there and read its step.")
    key = f"events-{number}"
    length = max((lines[-1].time_s - lines[0].time_s) / 20, 1e-3)
    st.dataframe(
        events.head(MOST_ROWS),
        hide_index=True,
        key=key,
        on_select=go_to_row(key, [line.time_s for line in lines], length),
        selection_mode="single-row",
    )
    own = totals_figure(phases, np.array([int(number)]), f"Where the time of r{int(number)} went")
    draw(own, "own", "Time of the request in each phase")
    _what_if(snapshot, asked, root)


def _what_if(snapshot: Snapshot, asked: Mapping[str, Any], root: Path) -> None:
    """Draw the choice of another policy for the same requests, and what this request would have
    met with under it.
    """
    folder = snapshot.folder
    st.subheader("What if another policy had served these requests?", anchor=False)
    current = str(snapshot.recording.manifest.get("policy"))
    others = [name for name in presets() if name != current]
    columns = st.columns([1.2, 1, 2], vertical_alignment="bottom")
    chosen = columns[0].selectbox("Policy", others, key="what_if", bind="query-params")
    columns[1].button(
        "Simulate it",
        key="simulate-what-if",
        on_click=_start_what_if,
        args=(snapshot, str(chosen), root),
        help="The same requests on the same GPU with the same pool; the run is kept",
        width="stretch",
    )
    refused = st.session_state.pop("what-if-refused", None)
    if refused is not None:
        st.error(f"**This cannot be simulated.** {escaped(refused)}")
    place = known_desk()
    jobs: list[PlayJob] = [] if place is None else place.what_ifs.get(folder, [])
    running = next((job for job in jobs if job.running), None)
    if running is not None:
        progress_of(running)
        return
    for job in jobs:
        if job.error is not None:
            st.error(f"**{escaped(job.request.policy.name)} failed.** {escaped(job.error)}")
        elif job.stopped:
            st.warning(f"{escaped(job.request.policy.name)} was cancelled.")
    ended = [job for job in jobs if job.error is None and not job.stopped]
    if ended:
        with error_in_words("The other run"):
            _compare_request(snapshot, asked, [Snapshot(str(job.folder)) for job in ended])


def _start_what_if(snapshot: Snapshot, name: str, root: Path) -> None:
    """Start a simulation of a recording's requests under another policy.

    Of a measured run its own policy is simulated, too: a simulation is compared with a simulation.
    """
    recording = snapshot.recording
    jobs = []
    try:
        policies = [load_policy(name)]
        if recording.manifest.get("source") == "engine":
            policies.insert(0, recorded_policy(recording))
        for policy in policies:
            found = what_if(recording, policy)
            request = RunRequest(
                found.workload,
                found.policy,
                found.gpu,
                found.model,
                found.limits,
                found.cost,
                found.pretended,
                found.plan_ahead,
                found.length_multiplier,
            )
            folder = new_folder(root / "what-if", f"{Path(snapshot.folder).name}-{policy.name}")
            jobs.append(PlayJob(request, folder))
    except (TraceError, PolicyError, SimError, SchedulerError, OSError) as error:
        st.session_state["what-if-refused"] = str(error)
        return
    desk().what_ifs[snapshot.folder] = jobs
    for job in jobs:
        job.start()


FIGURES_OF_REQUEST = {
    "ttft_s": "time to first token, s",
    "tpot_s": "time per output token, s",
    "e2e_s": "end to end, s",
    **{f"{phase.label}_s": f"{phase.words}, s" for phase in Phase if f"{phase.label}_s" in TABLE},
    "preemptions": "preemptions",
    "compressions": "compressions",
    "recomputed_tokens": "recomputed tokens",
    "prefix_hit_tokens": "prefix hits, tokens",
    "output_tokens": "output tokens",
}


def request_under(runs: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return the figures of one request in several runs: a row for each figure that is not 0
    everywhere, a column for each run, and the difference between the last and the first.
    """
    rows = []
    for key, words in FIGURES_OF_REQUEST.items():
        values = [float(row[key]) for row in runs.values()]
        if np.any(np.nan_to_num(values)):
            rows.append({"figure": words} | dict(zip(runs, values, strict=True)))
            rows[-1]["difference"] = values[-1] - values[0]
    return pd.DataFrame(rows, columns=["figure", *runs, "difference"])


def _compare_request(
    snapshot: Snapshot, asked: Mapping[str, Any], others: Sequence[Snapshot]
) -> None:
    """Draw a request's figures in the recorded run beside those in runs of the same requests."""
    runs: dict[str, Mapping[str, Any]] = {"recorded": asked}
    number = int(asked["number"])
    for other in others:
        frame = data.requests(other)
        row = frame[frame["number"] == number]
        if row.empty:
            st.warning(f"r{number} is not in the run {escaped(Path(other.folder).name)}.")
            return
        found = row.iloc[0].to_dict()
        name = str(other.recording.manifest["policy"])
        runs[f"{name}, simulated"] = found
        st.markdown(f"Under **{escaped(name)}**: {escaped(data.explainer(other).in_short(found))}")
    if snapshot.recording.manifest.get("source") == "engine":
        st.caption(
            "The recording was measured, the other runs are simulated; the difference is between "
            "the last run and the recording. Compare the simulated runs with each other."
        )
    st.dataframe(request_under(runs).round(6), hide_index=True)
    whole = {"recorded": snapshot.summary} | {
        name: other.summary for name, other in zip(list(runs)[1:], others, strict=True)
    }
    rates = [
        f"{escaped(name)} {value_of(found, HEADLINE) or 0:,.4g}" for name, found in whole.items()
    ]
    st.caption(f"Finished requests a second of the whole runs: {', '.join(rates)}.")
    last = others[-1].folder
    st.button(
        "Open that run at this request", on_click=_open_run, args=(last, number), key="open-other"
    )


def _open_run(folder: str, number: int) -> None:
    """Show a run that was simulated from here; its label ends with its last two folders."""
    st.session_state["open-folder"] = folder
    st.session_state["request"] = number
