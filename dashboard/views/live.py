"""The view Live: a recording that is still being written."""

import time

import plotly.graph_objects as go
import pyarrow as pa
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot, Source
from zlab.dashboard.figures.activity import activity_figure
from zlab.dashboard.figures.occupancy import state_layers
from zlab.dashboard.figures.style import CONFIG, finish, mark_moments
from zlab.dashboard.views.page import error_in_words, header, policy_changes, themed
from zlab.traces.occupancy import CACHED, FREE, PoolCounts
from zlab.traces.schema import Phase
from zlab.traces.timeline import step_series

NUM_BINS = 200
WINDOWS = {
    "last 10 s": 10.0,
    "last minute": 60.0,
    "last 10 minutes": 600.0,
    "the whole run": float("inf"),
}
REFRESH_S = (1, 2, 5, 10)
# A refresh that is overtaken by the next one removes the figures for a moment. The page keeps the
# height it has with figures, so that it does not scroll to its top.
HELD_OPEN = "<style>[data-testid=stMainBlockContainer] { min-height: max(1600px, 170vh); }</style>"
RATE_S = 10.0  # of run time
LAG_S = 2.0  # a busy engine writes at least as often
WAITING = (Phase.QUEUED, Phase.PREEMPTED, Phase.SWAPPED)
RUNNING = "Requests with blocks of the pool after the last step"
AWAY = "Requests that wait for admission, preempted and swapped ones included"
QUIET_S = 30  # without a new file, the writer may have stopped


def show(source: Source) -> None:
    """Draw a recording and refresh it while the run goes on."""
    st.html(HELD_OPEN)
    columns = st.columns([2, 1, 2], vertical_alignment="bottom")
    with columns[0]:
        words = st.segmented_control(
            "Show",
            list(WINDOWS),
            default="the whole run",
            required=True,
            key="span",
            bind="query-params",
        )
    with columns[1]:
        every = st.selectbox(
            "Refresh every, s", REFRESH_S, index=1, key="every", bind="query-params"
        )

    @st.fragment(run_every=float(every))
    def follow() -> None:
        with error_in_words(source.label):
            _draw(source, WINDOWS[str(words)])

    follow()


def _draw(source: Source, span_s: float) -> None:
    snapshot = Snapshot(source.folder)
    run = data.live_run(snapshot)
    occupancy, steps = run.pool, run.steps
    header(source.label, snapshot)
    _state_of_writing(snapshot)
    if occupancy is None or not occupancy.times.last_s:
        st.info("No whole part has been written yet; this page looks again by itself.")
        return
    last = now_of(snapshot, occupancy.times.last_s)
    window = (max(0.0, last - span_s), last)
    changes = policy_changes(snapshot, window, steps["start_s"].to_numpy())
    pool = (occupancy.num_blocks, occupancy.block_size)
    series = step_series(steps, occupancy.times, window, NUM_BINS, pool)
    now, phases = occupancy.counts[-1], run.phases_now()
    waiting = sum(phases[phase.label] for phase in WAITING)
    words, rate = output_rate(steps, snapshot.recording.complete, last)
    tiles = st.columns(6)
    tiles[0].metric("Run time", f"{last:,.1f} s")
    tiles[1].metric("Steps", f"{len(occupancy.times.end_s):,}")
    tiles[2].metric("Running", f"{sum(phases.values()) - waiting:,}", help=RUNNING)
    tiles[3].metric("Waiting", f"{waiting:,}", help=AWAY)
    tiles[4].metric(words, f"{rate:,.0f}")
    tiles[5].metric("Available blocks", f"{now[FREE] + now[CACHED]:,} of {occupancy.num_blocks:,}")
    # Keys and zoom stay the same at each refresh, so that nothing on the page moves.
    st.plotly_chart(
        themed(mark_moments(states_figure(occupancy, window), changes)),
        key="live-states",
        config=CONFIG,
        alt="Blocks by state over time",
    )
    st.plotly_chart(
        themed(mark_moments(activity_figure(series, pool), changes)),
        key="live-activity",
        config=CONFIG,
        alt="Steps over time",
    )


def now_of(snapshot: Snapshot, last_s: float) -> float:
    """Return the moment of the run that the figures end at, in seconds since its start.

    An engine that has nothing to do runs no step and writes nothing, but its clock goes on. A
    simulation's clock stops with its last step, and so does a run that has ended.
    """
    recording = snapshot.recording
    if recording.complete or recording.manifest.get("source") != "engine":
        return last_s
    age = time.time() - snapshot.written_s
    return last_s + age if LAG_S < age <= QUIET_S else last_s


def output_rate(steps: pa.Table, complete: bool, now_s: float) -> tuple[str, float]:
    """Return the title of the tile, and output tokens a second: over the last RATE_S seconds up to
    `now_s`, or over the whole of a run that has ended.
    """
    tokens = steps["output_tokens"].to_numpy()
    if complete:
        return "Output tokens/s, whole run", float(tokens.sum()) / now_s
    recent = steps["end_s"].to_numpy() > now_s - RATE_S
    return (
        f"Output tokens/s, last {RATE_S:.0f} s",
        float(tokens[recent].sum()) / min(RATE_S, now_s),
    )


def _state_of_writing(snapshot: Snapshot) -> None:
    if snapshot.recording.complete:
        st.success("This run has come to its end; nothing more will be written.")
        return
    age = max(0.0, time.time() - snapshot.written_s)
    if age > QUIET_S:
        st.warning(
            f"Nothing has been written for {age:,.0f} s: the run may have been stopped. Shown as "
            f"far as it came."
        )
    else:
        st.info("This run is being written.", icon=":material/fiber_manual_record:")


def states_figure(occupancy: PoolCounts, window_s: tuple[float, float]) -> go.Figure:
    """Stack the blocks by state: the mean over each time bin."""
    figure = go.Figure(state_layers(occupancy, window_s, NUM_BINS))
    figure.update_yaxes(title_text="blocks, mean", range=[0, occupancy.num_blocks])
    figure.update_xaxes(range=list(window_s))
    return finish(figure, 300)
