"""Move about a run: zoom in, out and back, pan, by buttons or by the keys w, s, a, d.

A box in a figure zooms in, or selects an area whose statistics are shown.

The part that is shown is kept in the fields `from`, `to`, `first` and `last` of the page's address.
A click on a figure opens a request, an event moves the cursor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot
from zlab.traces.schema import Phase

MIN_SPAN = 1e-6  # seconds
MOST_BACK = 50  # parts that are remembered
PART = ("from", "to", "first", "last")
ZOOM, PAN = 2.0, 0.5  # factor of a zoom, share of the window that a pan moves by
KEYS: Mapping[str, tuple[str, str, float, float]] = {
    # key: words, tip, zoom factor, pan in windows
    "a": ("← earlier", "Show an earlier part", 1.0, -PAN),
    "d": ("later →", "Show a later part", 1.0, PAN),
    "w": ("zoom in", "Show half as much time", 1 / ZOOM, 0.0),
    "s": ("zoom out", "Show twice as much time", ZOOM, 0.0),
}


def moved(
    window_s: tuple[float, float], last_s: float, zoom: float, pan: float
) -> tuple[float, float]:
    """Return the part of a run [0, `last_s`] that a zoom about the middle and a pan lead to.

    Args:
        window_s: The part that is shown.
        last_s: End of the run.
        zoom: Factor by which the part becomes longer.
        pan: Move, in lengths of the part; a part at an edge of the run stays inside.

    Returns:
        The new part, not longer than the run.
    """
    length = window_s[1] - window_s[0]
    middle = (window_s[0] + window_s[1]) / 2 + pan * length
    length = min(max(length * zoom, MIN_SPAN), max(last_s, MIN_SPAN))
    low = min(max(middle - length / 2, 0.0), max(last_s - length, 0.0))
    return low, low + length


def remember_part() -> None:
    """Keep the part that is shown, for the button `Back`."""
    part = tuple(st.session_state.get(key) for key in PART)
    parts: list[tuple[Any, ...]] = st.session_state.setdefault("parts_before", [])
    if not parts or parts[-1] != part:
        parts.append(part)
        del parts[:-MOST_BACK]


def show_part(low_s: float, high_s: float) -> None:
    """Show a part of the time."""
    remember_part()
    st.session_state["from"], st.session_state["to"] = round(low_s, 6), round(high_s, 6)


def _go_back() -> None:
    parts: list[tuple[Any, ...]] = st.session_state.get("parts_before", [])
    if parts:
        for key, value in zip(PART, parts.pop(), strict=True):
            st.session_state[key] = value


def _move(window_s: tuple[float, float], last_s: float, key: str) -> Callable[[], None]:
    def callback() -> None:
        _, _, zoom, pan = KEYS[key]
        show_part(*moved(window_s, last_s, zoom, pan))

    return callback


def navigation_buttons(window_s: tuple[float, float], last_s: float) -> None:
    """Draw the buttons that move about the run; each has a key."""
    with st.container(horizontal=True):
        for key, (words, tip, _, _) in KEYS.items():
            st.button(
                words,
                key=f"go-{key}",
                on_click=_move(window_s, last_s, key),
                shortcut=key,
                help=f"{tip} (key {key})",
            )
        st.button(
            "back",
            key="go-back",
            on_click=_go_back,
            shortcut="b",
            disabled=not st.session_state.get("parts_before"),
            help="Show what was shown before (key b)",
        )


def numbers_of_point(point: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return request and block of a clicked point, each None where the point names none.

    They are the point's `customdata`: a request, or a request and a block, -1 for none. Without
    it, the point's row `r17` names the request.
    """
    custom = point.get("customdata")
    given = list(custom) if isinstance(custom, list | tuple) else [custom]
    found = [
        number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None
        for number in [*given, None, None][:2]
    ]
    row = str(point.get("y", ""))
    if found == [None, None] and row.startswith("r") and row[1:].isdecimal():
        found[0] = int(row[1:])
    return found[0], found[1]


def open_clicked(chart: str) -> Callable[[], None]:
    """Open the request of what was clicked in a chart; of a block that no request owns alone, the
    life of the block.
    """

    def callback() -> None:
        points = st.session_state[chart]["selection"]["points"]
        request, block = numbers_of_point(points[0]) if points else (None, None)
        if request is not None:
            st.session_state["request"] = request
        elif block is not None:
            st.session_state["block"] = block

    return callback


def open_row(table: str, numbers: list[int]) -> Callable[[], None]:
    """Open the request `numbers[i]` when row i of a table is selected; -1: none."""

    def callback() -> None:
        rows = st.session_state[table]["selection"]["rows"]
        if rows and numbers[rows[0]] >= 0:
            st.session_state["request"] = int(numbers[rows[0]])

    return callback


def go_to_row(table: str, moments_s: list[float], length_s: float) -> Callable[[], None]:
    """Move the cursor to `moments_s[i]` when row i of a table is selected, and show `length_s`
    around it.
    """

    def callback() -> None:
        rows = st.session_state[table]["selection"]["rows"]
        if rows:
            moment = moments_s[rows[0]]
            st.session_state["at"] = round(moment, 6)
            show_part(max(0.0, moment - length_s / 2), moment + length_s / 2)

    return callback


def _set_cursor(moment_s: float) -> Callable[[], None]:
    def callback() -> None:
        st.session_state["at"] = moment_s

    return callback


def cursor_mark(window_s: tuple[float, float]) -> list[tuple[float, str]]:
    """Return the cursor as a moment that figures mark, [] where it is not in the window."""
    at = st.session_state.get("at")
    inside = at is not None and window_s[0] <= float(at) <= window_s[1]
    return [(float(at), "cursor")] if inside and at is not None else []


def step_panel(snapshot: Snapshot, last_s: float) -> None:
    """Draw the cursor's field, the step at the cursor with its plan in words, and buttons to the
    step before and after.
    """
    columns = st.columns([1.2, 1, 1, 3], vertical_alignment="bottom")
    with columns[0]:
        at = st.number_input(
            "Cursor at, s",
            value=None,
            min_value=0.0,
            format="%.6f",
            key="at",
            bind="query-params",
            help="All figures mark this moment; the plan of its step is shown in words",
        )
    if at is None:
        with columns[3]:
            st.caption("Enter a moment to read what the scheduler decided in its step.")
        return
    start_s = data.steps(snapshot)["start_s"].to_numpy()
    # the field has microseconds, steps have nanoseconds
    step = int(start_s.searchsorted(min(float(at), last_s) + 1e-6, side="right")) - 1
    for place, (words, other, key) in enumerate(
        (("step before", step - 1, "q"), ("step after", step + 1, "e")), 1
    ):
        known = 0 <= other < len(start_s)
        with columns[place]:
            st.button(
                words,
                key=f"step-{place}",
                on_click=_set_cursor(round(float(start_s[other]), 6) if known else 0.0),
                disabled=not known,
                shortcut=key,
                help=f"Move the cursor by a step (key {key})",
                width="stretch",
            )
    if step < 0:
        with columns[3]:
            st.caption("The first step has not begun at this moment.")
        return
    lines = data.explainer(snapshot).step_in_words(step)
    st.markdown("\n".join(f"- {line}" for line in lines))


BOX_ZOOMS, BOX_MEASURES = "zooms in", "selects an area"
AREA = ("area_from", "area_to")


def area_of(window_s: tuple[float, float]) -> tuple[float, float] | None:
    """Return the selected area (fields AREA) as far as it is in a window, None without one."""
    values = [st.session_state.get(key) for key in AREA]
    if None in values:
        return None
    low, high = (min(max(float(value or 0.0), window_s[0]), window_s[1]) for value in values)
    return (low, high) if high - low >= MIN_SPAN else None


def select_area(low_s: float, high_s: float) -> None:
    """Select a part of the time, whose statistics are shown."""
    for key, value in zip(AREA, (low_s, high_s), strict=True):
        st.session_state[key] = round(value, 6)


def _forget_area() -> None:
    for key in AREA:
        st.session_state[key] = None


def area_panel(snapshot: Snapshot, window_s: tuple[float, float]) -> None:
    """Draw what a box in a figure does, and what happened in the selected area, or in the part
    that is shown.
    """
    columns = st.columns([1.6, 1, 1, 1.2], vertical_alignment="bottom")
    with columns[0]:
        st.segmented_control(
            "A box that you draw",
            (BOX_ZOOMS, BOX_MEASURES),
            default=BOX_ZOOMS,
            required=True,
            key="box",
            bind="query-params",
        )
    for column, key, words in zip(columns[1:], AREA, ("Area from, s", "Area to, s"), strict=False):
        with column:
            st.number_input(
                words, value=None, min_value=0.0, format="%.6f", key=key, bind="query-params"
            )
    columns[3].button("Forget the area", on_click=_forget_area, width="stretch")
    area = area_of(window_s)
    low, high = area or window_s
    with st.expander(f"What happened from {low:,.4g} to {high:,.4g} s", expanded=area is not None):
        statistics = area_statistics(snapshot, (low, high))
        st.table({name: [f"{value:,.6g}"] for name, value in statistics.items()})


def area_statistics(snapshot: Snapshot, window_s: tuple[float, float]) -> dict[str, Any]:
    """Return what happened in a part of a run: steps, tokens, requests and decisions in it."""
    steps = data.steps(snapshot)
    start, end = steps["start_s"].to_numpy(), steps["end_s"].to_numpy()
    inside = (end > window_s[0]) & (end <= window_s[1])
    frame, marks = data.requests(snapshot), data.marks(snapshot)
    phases = data.phases(snapshot).within(window_s)
    waits = (Phase.QUEUED.place, Phase.PREEMPTED.place, Phase.SWAPPED.place)
    clipped = phases.end_s.clip(max=window_s[1]) - phases.start_s.clip(min=window_s[0])

    def within(values: Any) -> int:
        return int(((values > window_s[0]) & (values <= window_s[1])).sum())

    busy = (end.clip(max=window_s[1]) - start.clip(min=window_s[0])).clip(min=0.0).sum()
    return {
        "seconds": window_s[1] - window_s[0],
        "steps that end": int(inside.sum()),
        "seconds in steps": float(busy),
        "output tokens": int(steps["output_tokens"].to_numpy()[inside].sum()),
        "prefill tokens": int(steps["prefill_tokens"].to_numpy()[inside].sum()),
        "requests that arrive": within(frame["arrival_s"]),
        "requests that end": within(frame["finish_s"]),
        "preemptions": within(marks.preempted_s),
        "compressions that begin": within(marks.compressed_s),
        "request-seconds in the queue": float(clipped[np.isin(phases.phase, waits)].sum()),
    }
