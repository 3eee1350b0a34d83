"""Who holds which blocks when: the pool over time, one block's life, one request's blocks."""

from collections.abc import Callable

import pandas as pd
import streamlit as st

from dashboard import cache
from dashboard.figures.activity import NUM_BINS, activity_figure, holders_figure
from dashboard.figures.occupancy import Shown, occupancy_figure
from dashboard.figures.style import CONFIG
from dashboard.load import Source
from dashboard.views.page import blocks_of_page, draw_to_zoom, exports, number_from_url, told, window_of, zoom_fields
from traces.follow import blocks_of, life_of
from traces.occupancy import STATES, Occupancy
from traces.palette import BLOCK_LOOKS
from traces.series import step_series

COLOURS = ("state", "request")


def show(source: Source) -> None:
    """Draw the view of one recording."""
    with told(source.label):
        with st.spinner("Replaying the blocks …"):
            occupancy = cache.occupancy(source.folder)
        if not occupancy.times.last_s:
            st.info("No step has been recorded yet. Open the view **Live** to follow the run as it is written.")
            return
        _draw(source, occupancy)


def _draw(source: Source, occupancy: Occupancy) -> None:
    holdings, marks = cache.holdings(source.folder), cache.marks(source.folder)
    zoom_fields(with_blocks=True)
    columns = st.columns([1.2, 1, 1], vertical_alignment="bottom")
    with columns[0]:
        colour_by = st.segmented_control(
            "Colour blocks by", COLOURS, default="state", required=True, key="colour", bind="query-params"
        )
    with columns[1]:
        request = number_from_url(
            "Follow request", "request", 0, True, "Its blocks stand out; its story is in Requests"
        )
    with columns[2]:
        block = number_from_url("Follow block", "block", 0, True, "Its life is told below the figure")
    window = window_of(occupancy.times.last_s)
    shown = Shown(window, blocks_of_page(occupancy.num_blocks))
    figure = occupancy_figure(occupancy, holdings, marks, shown, str(colour_by), request)
    st.caption(_how_to_read(shown, occupancy, str(colour_by), request))
    draw_to_zoom(figure, "pool", (shown, colour_by, request), "Block states over time", takes_blocks=True)
    if block is not None:
        _life(occupancy, int(block))
    if request is not None:
        _held(occupancy, int(request))
    pool = (occupancy.num_blocks, occupancy.block_size)
    series = step_series(cache.steps(source.folder), occupancy.times, window, NUM_BINS, pool)
    activity = activity_figure(series, pool)
    st.subheader("What the steps did", anchor=False)
    draw_to_zoom(activity, "activity", window, "Requests, tokens a second and unused slots over time")
    st.subheader("Who holds most", anchor=False)
    st.caption("Requests stacked by the blocks they hold. Click a layer to follow its request; drag to pan.")
    holders = holders_figure(occupancy, holdings, window, request)
    key = f"holders|{window}|{request}"
    st.plotly_chart(
        holders, key=key, config=CONFIG, on_select=_follow(key), selection_mode="points", alt="Blocks held by request"
    )
    edges = pd.DataFrame({"second": series.centres_s, "output_tokens_per_s": series.output_tokens_per_s} | series.peaks)
    counts = pd.DataFrame(occupancy.counts, columns=list(STATES))
    counts.insert(0, "from_second", occupancy.change_s)
    exports(
        source.folder,
        {"Blocks": figure, "Steps": activity, "Who holds most": holders},
        {"blocks by state": counts, "steps": edges},
    )


def _how_to_read(shown: Shown, occupancy: Occupancy, colour_by: str, request: int | None) -> str:
    """What the picture says and what it leaves to a zoom."""
    span = f"{shown.window_s[0]:.4g} to {shown.window_s[1]:.4g} s, blocks {shown.blocks[0]} to {shown.blocks[1] - 1}"
    if request is not None:
        what = f"Blocks of r{request} in orange, those of others in grey."
    elif colour_by == "request":
        what = "A colour for each request that holds a block (colours repeat); hatched: shared; dotted: cached."
    else:
        what = "Each row is a block, from left to right is time; colours and hatches as in the legend."
    per_row = -(-shown.num_blocks // 400)
    coarse = f" A row stands for {per_row} blocks until you zoom in." if per_row > 1 else ""
    return f"{what} Showing {span} of {occupancy.num_blocks}.{coarse} **Draw a box to zoom in.**"


def _follow(key: str) -> Callable[[], None]:
    def callback() -> None:
        points = st.session_state[key]["selection"]["points"]
        if points and "customdata" in points[0]:
            number = points[0]["customdata"]
            st.session_state["request"] = int(number[0] if isinstance(number, list) else number)

    return callback


def _life(occupancy: Occupancy, block: int) -> None:
    """One block's life as a table."""
    if block >= occupancy.num_blocks:
        st.warning(f"There is no block {block}: the pool has {occupancy.num_blocks}, numbered from 0.")
        return
    life = life_of(occupancy, block)
    rows = pd.DataFrame(
        {
            "from, s": [s.start_s for s in life],
            "to, s": [s.end_s for s in life],
            "state": [BLOCK_LOOKS[s.state].words for s in life],
            "owner": ["" if s.owner is None else f"r{s.owner}" for s in life],
            "owners": [s.refs for s in life],
            "by the doing of": ["" if s.actor is None else f"r{s.actor}" for s in life],
        }
    )
    st.subheader(f"The life of block {block}", anchor=False)
    st.dataframe(rows.head(2000), hide_index=True, height=240)


def _held(occupancy: Occupancy, request: int) -> None:
    """Which blocks a request held, and where to read its story."""
    held = blocks_of(occupancy, request)
    if not len(held.block):
        st.warning(f"r{request} never held a block in this recording.")
        return
    first, last = held.start_s.min(), held.end_s.max()
    st.info(
        f"r{request} held {len(set(held.block.tolist()))} different blocks between {first:.4g} and {last:.4g} s. "
        "The view **Requests** tells its story."
    )
