"""What every view shares: the shell's answer to a broken recording, selections that live in the URL, exports."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard import archive
from dashboard.export import standalone
from dashboard.figures.style import CONFIG
from traces.perfetto import write_perfetto
from traces.recording import Recording
from traces.workload import TraceError

MIN_SPAN = 1e-6  # seconds


@contextmanager
def told(what: str) -> Iterator[None]:
    """Show what is wrong with a file in words, and what to do, instead of a traceback."""
    try:
        yield
    except TraceError as error:
        st.error(f"**{what} cannot be shown.** {error}")
        st.caption(
            "Choose another recording on the left. A run that was cut off can be read up to its last whole part; one "
            "made by another version must be made again: `zlab replay TRACE --out runs/NAME`."
        )


def number_from_url(words: str, key: str, lowest: float | None, whole: bool, tip: str) -> Any:
    """A number field, empty by default, whose value is part of the page's address."""
    step, shape = (1, "%d") if whole else (None, "%.3f")
    return st.number_input(
        words, value=None, min_value=lowest, step=step, format=shape, key=key, bind="query-params", help=tip
    )


def window_of(last_s: float) -> tuple[float, float]:
    """The part of the run that is looked at (fields `from` and `to` of the page), the whole run by default."""
    start, end = st.session_state.get("from"), st.session_state.get("to")
    low = min(max(float(start or 0.0), 0.0), last_s)
    high = last_s if end is None else min(float(end), last_s)
    if high - low < MIN_SPAN:
        return (0.0, max(last_s, MIN_SPAN))
    return (low, high)


def blocks_of_page(num_blocks: int) -> tuple[int, int]:
    """The blocks that are looked at (fields `first` and `last`), from inclusive to exclusive."""
    first, last = st.session_state.get("first"), st.session_state.get("last")
    low = min(max(int(first or 0), 0), num_blocks - 1)
    high = num_blocks if last is None else min(int(last) + 1, num_blocks)
    return (low, high) if high > low else (0, num_blocks)


def zoom_fields(with_blocks: bool) -> None:
    """Fields of the part that is looked at, and a button back to the whole."""
    columns = st.columns([1, 1, 1, 1, 1] if with_blocks else [1, 1, 1, 2], vertical_alignment="bottom")
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


def _zoom_out() -> None:
    for key in ("from", "to", "first", "last"):
        st.session_state[key] = None


def zoomed(chart: str, takes_blocks: bool) -> Callable[[], None]:
    """What a box drawn in a chart does: the page shows that part, in full detail."""

    def callback() -> None:
        boxes = st.session_state[chart]["selection"]["box"]
        if not boxes:
            return
        low, high = sorted(float(value) for value in boxes[-1]["x"])
        if high - low < MIN_SPAN:
            return
        st.session_state["from"], st.session_state["to"] = max(0.0, round(low, 6)), round(high, 6)
        if takes_blocks and boxes[-1]["yref"] == "y":
            top, bottom = sorted(float(value) for value in boxes[-1]["y"])
            st.session_state["first"], st.session_state["last"] = max(0, round(top)), max(0, round(bottom))

    return callback


def draw(figure: go.Figure, key: str, words: str) -> None:
    """Draw a figure that needs no answer from its reader; `words` describe it to who cannot see it."""
    st.plotly_chart(figure, key=key, config=CONFIG, alt=words)


def draw_to_zoom(figure: go.Figure, name: str, part: object, words: str, takes_blocks: bool = False) -> None:
    """Draw a figure in which a box zooms. Its key changes with the part shown: the old box does not stay behind."""
    key = f"{name}|{part}"
    st.plotly_chart(
        figure,
        key=key,
        config=CONFIG,
        on_select=zoomed(key, takes_blocks),
        selection_mode="box",
        alt=words,
    )


def exports(folder: str, figures: Mapping[str, go.Figure], tables: Mapping[str, pd.DataFrame]) -> None:
    """Buttons that take the view away with one: its data, its figures, the whole recording. Made when asked for."""
    with st.expander("Export"):
        st.caption("A picture (PNG) of one figure: the camera in its upper right corner.")
        name = Path(folder).name
        ready: list[tuple[str, str, str, Callable[[], bytes]]] = [
            (f"{words} (CSV)", f"{name}-{words}.csv", "text/csv", partial(_csv, table))
            for words, table in tables.items()
        ]
        ready += [
            ("Figures (HTML)", f"{name}.html", "text/html", lambda: standalone(name, figures).encode()),
            ("Trace for Perfetto", f"{name}.perfetto.json", "application/json", lambda: _perfetto(folder)),
            ("Recording (zip)", f"{name}.zip", "application/zip", lambda: archive.pack(Path(folder))),
        ]
        for column, (words, file, kind, make) in zip(st.columns(len(ready)), ready, strict=True):
            column.download_button(words, make, file, kind, on_click="ignore", width="stretch")


def _csv(table: pd.DataFrame) -> bytes:
    return str(table.to_csv(index=False)).encode()


def _perfetto(folder: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        write_perfetto(Recording(folder), path)
        return path.read_bytes()
