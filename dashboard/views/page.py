"""Controls that views share: errors in words, selections kept in the address, exports."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot
from zlab.dashboard.figures.style import CONFIG, INKS, mark_area, mark_moments
from zlab.dashboard.report import standalone
from zlab.dashboard.views.identity import changes_of, identity
from zlab.dashboard.views.navigation import (
    BOX_MEASURES,
    MIN_SPAN,
    area_of,
    cursor_mark,
    navigation_buttons,
    open_clicked,
    remember_part,
    select_area,
    show_part,
)
from zlab.traces.perfetto import write_perfetto
from zlab.traces.recording import Recording
from zlab.traces.timeline import FloatArray
from zlab.traces.workload import TraceError


def escaped(text: object) -> str:
    """Return text from a file or a name so that Markdown shows it as it is.

    No emphasis, formula, emoji, image or link comes of it: an image in a manifest would be fetched
    from wherever it points to.
    """
    line = " ".join(str(text).split())
    line = re.sub(r"[\\`*\[\]<>$~|&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)
    # A word joiner, which has no width, keeps addresses from becoming links, and names between
    # colons from becoming icons.
    line = re.sub(r":(?=[/A-Za-z0-9_+-])|(?<=www)(?=\.)|(?<=@)", "\\g<0>\u2060", line, flags=re.I)
    return re.sub(r"^(?=[#+>-]|\d+[.)])", "\u2060", line)


def as_code(text: object) -> str:
    """Return text from a file as a code span of Markdown."""
    line = " ".join(str(text).split()) or " "
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


@contextmanager
def error_in_words(what: str) -> Iterator[None]:
    """Show an error of a file in words, with what to do, instead of a traceback."""
    try:
        yield
    except TraceError as error:
        st.error(f"**{escaped(what)} cannot be shown.** {escaped(error)}")
        st.caption(
            "Choose another recording on the left. A run that was cut off can be read up to its "
            "last whole part; one "
            "made by another version must be made again: `zlab replay TRACE --out runs/NAME`."
        )


def name_dropped_rows(snapshots: Mapping[str, Snapshot]) -> None:
    """Say which recordings (by label) were made from traces that were not used as a whole."""
    for label, snapshot in snapshots.items():
        for words in snapshot.dropped:
            st.caption(f"{escaped(label)}: {escaped(words)}.")


def header(label: str, snapshot: Snapshot) -> None:
    """Say which recording a view shows: who decided, on which machine, for which requests."""
    cells = identity(snapshot.recording.manifest).items()
    st.markdown(
        f"**{escaped(label)}**  \n" + " · ".join(f"{name} {as_code(text)}" for name, text in cells)
    )
    name_dropped_rows({label: snapshot})


def policy_changes(
    snapshot: Snapshot, window_s: tuple[float, float], start_s: FloatArray | None = None
) -> list[tuple[float, str]]:
    """Return when the policy changed within a window, in seconds, and what follows.

    `start_s` has the starts of the steps where they are known already.
    """
    changes = changes_of(snapshot.recording.manifest)
    if not changes:
        return []
    if start_s is None:
        start_s = data.steps(snapshot)["start_s"].to_numpy()
    moments = [
        (float(start_s[change.step]), f"policy: {change.policy}")
        for change in changes
        if 0 <= change.step < len(start_s)
    ]
    return [moment for moment in moments if window_s[0] <= moment[0] <= window_s[1]]


def mark_figure(figure: go.Figure, snapshot: Snapshot, window_s: tuple[float, float]) -> go.Figure:
    """Mark in a figure over time changes of the policy, the cursor and the selected area."""
    mark_moments(figure, [*policy_changes(snapshot, window_s), *cursor_mark(window_s)])
    area = area_of(window_s)
    return figure if area is None else mark_area(figure, area)


def number_from_url(words: str, key: str, lowest: float | None, whole: bool, tip: str) -> Any:
    """Draw a number field, empty by default, whose value is part of the page's address."""
    step, shape = (1, "%d") if whole else (None, "%.3f")
    return st.number_input(
        words,
        value=None,
        min_value=lowest,
        step=step,
        format=shape,
        key=key,
        bind="query-params",
        help=tip,
    )


def window_of(last_s: float) -> tuple[float, float]:
    """Return the time window shown (fields `from` and `to`), the whole run by default."""
    start, end = st.session_state.get("from"), st.session_state.get("to")
    low = min(max(float(start or 0.0), 0.0), last_s)
    high = last_s if end is None else min(float(end), last_s)
    if high - low < MIN_SPAN:
        return (0.0, max(last_s, MIN_SPAN))
    return (low, high)


def blocks_of_page(num_blocks: int) -> tuple[int, int]:
    """Return the blocks shown (fields `first` and `last`), from inclusive to exclusive."""
    first, last = st.session_state.get("first"), st.session_state.get("last")
    low = min(max(int(first or 0), 0), num_blocks - 1)
    high = num_blocks if last is None else min(int(last) + 1, num_blocks)
    return (low, high) if high > low else (0, num_blocks)


def zoom_fields(with_blocks: bool, last_s: float) -> None:
    """Draw the fields of the part shown, a button that returns to the whole, and buttons and keys
    that move about the run, which ends at `last_s`.
    """
    columns = st.columns(
        [1, 1, 1, 1, 1] if with_blocks else [1, 1, 1, 2], vertical_alignment="bottom"
    )
    with columns[0]:
        number_from_url("From, s", "from", 0.0, False, "Start of the part that is shown")
    with columns[1]:
        number_from_url("To, s", "to", 0.0, False, "End of the part that is shown")
    if with_blocks:
        with columns[2]:
            number_from_url("First block", "first", 0, True, "First block that is shown")
        with columns[3]:
            number_from_url("Last block", "last", 0, True, "Last block that is shown")
    with columns[4 if with_blocks else 2]:
        st.button("Show the whole run", on_click=_zoom_out, width="stretch")
    navigation_buttons(window_of(last_s), last_s)


def _zoom_out() -> None:
    remember_part()
    for key in ("from", "to", "first", "last"):
        st.session_state[key] = None


def zoomed(chart: str, takes_blocks: bool) -> Callable[[], None]:
    """Show the part of a chart in which the user drew a box, or select it as an area."""

    def callback() -> None:
        boxes = st.session_state[chart]["selection"]["box"]
        if not boxes:
            return
        low, high = sorted(float(value) for value in boxes[-1]["x"])
        if high - low < MIN_SPAN:
            return
        if st.session_state.get("box") == BOX_MEASURES:
            select_area(max(0.0, low), high)
            return
        show_part(max(0.0, low), high)
        if takes_blocks and boxes[-1]["yref"] == "y":
            top, bottom = sorted(float(value) for value in boxes[-1]["y"])
            st.session_state["first"], st.session_state["last"] = (
                max(0, round(top)),
                max(0, round(bottom)),
            )

    return callback


def themed(figure: go.Figure) -> go.Figure:
    """Give the words of a figure a colour that can be read on the reader's page."""
    ink = {"color": INKS["dark" if st.context.theme.type == "dark" else "light"]}
    figure.update_xaxes(tickfont=ink, title={"font": ink})
    figure.update_yaxes(tickfont=ink, title={"font": ink})
    return figure.update_layout(font=ink, legend={"font": ink})


def draw(figure: go.Figure, key: str, words: str) -> None:
    """Draw a figure without interaction; `words` describe it for screen readers."""
    st.plotly_chart(themed(figure), key=key, config=CONFIG, alt=words)


def draw_to_zoom(
    figure: go.Figure,
    name: str,
    part: object,
    words: str,
    takes_blocks: bool = False,
    opens: bool = False,
) -> None:
    """Draw a figure in which a box zooms.

    Its key contains the part shown, so that an old box disappears.

    Args:
        figure: The figure.
        name: Its name on the page.
        part: The part of the run that it shows.
        words: Describe it for screen readers.
        takes_blocks: A box selects blocks, too.
        opens: A click opens the request of what was clicked.
    """
    key = f"{name}|{part}"
    to_part = zoomed(key, takes_blocks)
    to_request = open_clicked(key)

    def selected() -> None:
        to_part()
        if opens and not st.session_state[key]["selection"]["box"]:
            to_request()

    st.plotly_chart(
        themed(figure),
        key=key,
        config=CONFIG,
        on_select=selected,
        selection_mode=("box", "points") if opens else "box",
        alt=words,
    )


def exports(
    folder: str, figures: Mapping[str, go.Figure], tables: Mapping[str, pd.DataFrame]
) -> None:
    """Draw buttons that export data, figures and the recording. Exports are made on demand."""
    with st.expander("Export"):
        st.caption("A picture (PNG) of one figure: the camera in its upper right corner.")
        name = Path(folder).name
        ready: list[tuple[str, str, str, Callable[[], bytes]]] = [
            (f"{words} (CSV)", f"{name}-{words}.csv", "text/csv", partial(csv_of, table))
            for words, table in tables.items()
        ]
        ready += [
            (
                "Figures (HTML)",
                f"{name}.html",
                "text/html",
                lambda: standalone(name, figures).encode(),
            ),
            (
                "Trace for Perfetto",
                f"{name}.perfetto.json",
                "application/json",
                lambda: _perfetto(folder),
            ),
            (
                "Recording (zip)",
                f"{name}.zip",
                "application/zip",
                lambda: data.pack(Path(folder)),
            ),
        ]
        for column, (words, file, kind, make) in zip(st.columns(len(ready)), ready, strict=True):
            column.download_button(words, make, file, kind, on_click="ignore", width="stretch")


def csv_of(table: pd.DataFrame) -> bytes:
    """Return a table as CSV whose cells no spreadsheet takes for formulas.

    Text that begins with = + - @ or a control character gets an apostrophe in front (OWASP, "CSV
    injection"). Numbers stay as they are.
    """
    safe = table.rename(columns=lambda name: _no_formula(str(name)))
    for place, kind in enumerate(table.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            safe.isetitem(place, [_no_formula(cell) for cell in safe.iloc[:, place]])
    return str(safe.to_csv(index=False)).encode()


def _no_formula(cell: object) -> object:
    risky = isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r", "\n")
    return f"'{cell}" if risky else cell


def _perfetto(folder: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        write_perfetto(Recording(folder), path)
        return path.read_bytes()
