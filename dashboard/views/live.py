"""A recording that is still being written, followed as it grows."""

import time

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from plotly.subplots import make_subplots

from dashboard import cache
from dashboard.figures.activity import activity_figure
from dashboard.figures.style import CONFIG, area, finish, times
from dashboard.load import Source, stamp
from dashboard.views.page import told
from traces.detail import fullest_counts
from traces.occupancy import CACHED, FREE, STATES, Occupancy
from traces.palette import BLOCK_LOOKS
from traces.series import step_series

NUM_BINS = 200
WINDOWS = {"last 10 s": 10.0, "last minute": 60.0, "last 10 minutes": 600.0, "the whole run": float("inf")}
REFRESH_S = (1, 2, 5, 10)
# A refresh that the next one overtakes takes the figures away for a moment; the page must not shrink and scroll to its
# top meanwhile, so it is held at the height that it has with them.
HELD_OPEN = "<style>[data-testid=stMainBlockContainer] { min-height: max(1600px, 170vh); }</style>"
QUIET_S = 30  # without a new file the writer may have gone
STACKED = ("shared", "owned", "target", "held", "cached", "free")


def show(source: Source) -> None:
    """Draw the view of one recording; it is refreshed by itself while the run goes on."""
    st.html(HELD_OPEN)
    columns = st.columns([2, 1, 2], vertical_alignment="bottom")
    with columns[0]:
        words = st.segmented_control(
            "Show", list(WINDOWS), default="the whole run", required=True, key="span", bind="query-params"
        )
    with columns[1]:
        every = st.selectbox("Refresh every, s", REFRESH_S, index=1, key="every", bind="query-params")

    @st.fragment(run_every=float(every))
    def follow() -> None:
        with told(source.label):
            _draw(source, WINDOWS[str(words)])

    follow()


def _draw(source: Source, span_s: float) -> None:
    recording = cache.open_recording(source.folder)
    occupancy = cache.occupancy(source.folder)
    _state_of_writing(source, recording.complete)
    last = occupancy.times.last_s
    if not last:
        st.info("No whole part has been written yet; this page looks again by itself.")
        return
    window = (max(0.0, last - span_s), last)
    pool = (occupancy.num_blocks, occupancy.block_size)
    series = step_series(cache.steps(source.folder), occupancy.times, window, NUM_BINS, pool)
    now = occupancy.counts[-1]
    tiles = st.columns(6)
    tiles[0].metric("Run time", f"{last:,.1f} s")
    tiles[1].metric("Steps", f"{len(occupancy.times.end_s):,}")
    tiles[2].metric("Running", f"{series.peaks['running'][-1]:,}")
    tiles[3].metric("Waiting", f"{series.peaks['waiting'][-1]:,}")
    tiles[4].metric("Output tokens/s", f"{np.mean(series.output_tokens_per_s[-NUM_BINS // 10 :]):,.0f}")
    tiles[5].metric("Available blocks", f"{now[FREE] + now[CACHED]:,} of {occupancy.num_blocks:,}")
    # The same keys at every refresh, and a figure that keeps its zoom: nothing on the page moves.
    st.plotly_chart(states_figure(occupancy, window), key="live-states", config=CONFIG, alt="Blocks by state over time")
    st.plotly_chart(activity_figure(series, pool), key="live-activity", config=CONFIG, alt="Steps over time")


def _state_of_writing(source: Source, complete: bool) -> None:
    if complete:
        st.success("This run has come to its end; nothing more will be written.")
        return
    newest = max((changed for _, _, changed in stamp(source.folder)), default=0) / 1e9
    age = max(0.0, time.time() - newest)
    if age > QUIET_S:
        st.warning(
            f"Nothing has been written for {age:,.0f} s: the run may have been stopped. Shown as far as it came."
        )
    else:
        st.info("This run is being written.", icon=":material/fiber_manual_record:")


def states_figure(occupancy: Occupancy, window_s: tuple[float, float]) -> go.Figure:
    """Blocks by state, stacked, each bin at its fullest moment."""
    edges, counts = fullest_counts(occupancy, window_s, NUM_BINS)
    figure = make_subplots(rows=1, cols=1)
    x = times(edges, window_s)
    for name in STACKED:
        values = counts[:, STATES.index(name)]
        figure.add_trace(area(BLOCK_LOOKS[name], x, [*values.tolist(), int(values[-1])], "blocks"))
    figure.update_yaxes(title_text="blocks", range=[0, occupancy.num_blocks])
    figure.update_xaxes(range=list(window_s))
    return finish(figure, 300)
