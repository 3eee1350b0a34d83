"""What sessions share: recordings read once for as long as they do not change. Only a few are kept at a time.

No function shows a spinner: in a page that refreshes itself one would push everything below it about.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import streamlit as st

from dashboard.figures.compare import LATENCY_COLUMNS
from dashboard.figures.occupancy import Marks
from dashboard.load import Stamp, read_marks, request_frame, stamp
from traces.holding import Holdings, read_holdings
from traces.occupancy import Occupancy, read_occupancy
from traces.phases import Phases, read_phases
from traces.recording import Recording
from traces.series import COLUMNS
from traces.story import Story

FEW, SOME = 6, 16  # large things and small ones that are kept


def open_recording(folder: str) -> Recording:
    """The recording as it is now. Raises RecordingError."""
    return Recording(folder)


def occupancy(folder: str) -> Occupancy:
    """Its blocks, replayed."""
    return _occupancy(folder, stamp(folder))


def holdings(folder: str) -> Holdings:
    """What its requests hold."""
    return _holdings(folder, stamp(folder))


def marks(folder: str) -> Marks:
    """Its preemptions and compressions."""
    return _marks(folder, stamp(folder))


def phases(folder: str) -> Phases:
    """What its requests were doing."""
    return _phases(folder, stamp(folder))


def story(folder: str) -> Story:
    """Its teller."""
    return _story(folder, stamp(folder))


def steps(folder: str) -> pa.Table:
    """The columns of its steps that are drawn."""
    return _steps(folder, stamp(folder))


def requests(folder: str) -> pd.DataFrame:
    """Its requests by number."""
    return _requests(folder, stamp(folder))


def latencies(folder: str) -> pa.Table:
    """The columns of its requests that latencies need."""
    return _latencies(folder, stamp(folder))


@st.cache_resource(max_entries=FEW, show_spinner=False)
def _occupancy(folder: str, stamp: Stamp) -> Occupancy:
    return read_occupancy(Recording(folder))


@st.cache_resource(max_entries=FEW, show_spinner=False)
def _holdings(folder: str, stamp: Stamp) -> Holdings:
    return read_holdings(Recording(folder))


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _marks(folder: str, stamp: Stamp) -> Marks:
    return read_marks(Recording(folder))


@st.cache_resource(max_entries=FEW, show_spinner=False)
def _phases(folder: str, stamp: Stamp) -> Phases:
    return read_phases(Recording(folder))


@st.cache_resource(max_entries=2, show_spinner=False)
def _story(folder: str, stamp: Stamp) -> Story:
    return Story(Recording(folder), _phases(folder, stamp))


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _steps(folder: str, stamp: Stamp) -> pa.Table:
    return Recording(folder).table("steps", COLUMNS)


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _requests(folder: str, stamp: Stamp) -> pd.DataFrame:
    return request_frame(Recording(folder).table("requests"))


@st.cache_resource(max_entries=SOME, show_spinner=False)
def _latencies(folder: str, stamp: Stamp) -> pa.Table:
    return Recording(folder).table("requests", LATENCY_COLUMNS)


def summary(folder: str) -> dict[str, Any]:
    """The figures in its manifest, {} for a run that has none yet. Raises RecordingError."""
    found = Recording(Path(folder)).manifest.get("summary")
    return found if isinstance(found, dict) else {}
