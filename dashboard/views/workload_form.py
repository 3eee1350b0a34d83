"""Where the requests of a simulation come from: made up by a recipe, or an uploaded trace."""

import tempfile
from pathlib import Path

import streamlit as st

from traces.arrivals import Poisson
from traces.formats import FORMATS, check_trace
from traces.sharing import chat
from traces.synthetic import REASONING_SHAPES, fixed, reasoning
from traces.workload import TraceError, Workload

RECIPES = ("reasoning", "chat", "fixed lengths", "uploaded trace")
MOST_REQUESTS = 20_000
SHOWN_BAD = 20
UPLOAD_MB = 50


def workload_form() -> Workload | None:
    """Draw the form; the workload it describes, None while a trace is still missing. Raises TraceError."""
    recipe = st.segmented_control(
        "Requests", RECIPES, default=RECIPES[0], required=True, key="recipe", bind="query-params"
    )
    if recipe == "uploaded trace":
        return _uploaded()
    columns = st.columns(3)
    seed = int(columns[2].number_input("Seed", 0, 1_000_000, 0, key="seed", bind="query-params"))
    if recipe == "reasoning":
        shapes = list(REASONING_SHAPES)
        shape = columns[0].selectbox("Shape", shapes, index=shapes.index("amc23"), key="shape", bind="query-params")
        most = int(columns[1].number_input("At most requests", 1, MOST_REQUESTS, 160, key="most", bind="query-params"))
        whole = _reasoning(str(shape), seed)
        return Workload(list(whole)[:most], whole.meta)
    count = int(columns[0].number_input("Requests in all", 1, MOST_REQUESTS, 300, key="count", bind="query-params"))
    rate = float(columns[1].number_input("Arrivals a second", 0.01, 1000.0, 5.0, key="rate", bind="query-params"))
    if recipe == "chat":
        return _chat(count, rate, seed)
    columns = st.columns(3)
    prompt = int(columns[0].number_input("Prompt tokens", 1, 100_000, 512, key="prompt"))
    output = int(columns[1].number_input("Output tokens", 1, 100_000, 1024, key="output"))
    return _fixed(count, prompt, output, rate, seed)


@st.cache_data(max_entries=8, show_spinner=False)
def _reasoning(shape: str, seed: int) -> Workload:
    return reasoning(shape, seed)


@st.cache_data(max_entries=8, show_spinner="Making up the conversations …")
def _chat(count: int, rate: float, seed: int) -> Workload:
    return chat(count, None, Poisson(rate), seed)


@st.cache_data(max_entries=8, show_spinner=False)
def _fixed(count: int, prompt: int, output: int, rate: float, seed: int) -> Workload:
    return fixed(count, prompt, output, rate, seed)


def _uploaded() -> Workload | None:
    file = st.file_uploader(
        f"Trace (at most {UPLOAD_MB} MB)",
        type=["csv", "jsonl", "json"],
        key="trace_file",
        max_upload_size=UPLOAD_MB,
        help=f"In one of the formats {', '.join(FORMATS)}; which one is told by its columns.",
    )
    if file is None:
        st.info("Upload a trace, or choose a recipe above.")
        return None
    bad, num_bad, workload = _read(file.getvalue(), file.name)
    if num_bad:
        st.warning(f"{num_bad:,} rows cannot be used and are left out; the first of them:")
        st.dataframe(bad, hide_index=True, height=180)
    if workload is None:
        raise TraceError(f"{file.name}: no row of it can be used")
    st.caption(f"{file.name}: {len(workload):,} requests.")
    return workload


@st.cache_data(max_entries=4, show_spinner="Reading the trace …")
def _read(data: bytes, name: str) -> tuple[list[dict[str, object]], int, Workload | None]:
    """(first bad rows, how many there are, what could be read) of an uploaded trace."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"trace{Path(name).suffix.lower()}"
        path.write_bytes(data)
        try:
            report = check_trace(path, limit=SHOWN_BAD)
        except TraceError as error:
            raise TraceError(str(error).replace(str(path), name)) from None
    rows: list[dict[str, object]] = [{"line": b.line, "reason": b.reason, "row": b.detail} for b in report.bad_lines]
    return rows, report.num_bad, report.workload
