"""The view Occupancy: the pool over time, the life of one block, the blocks of one request."""

from pathlib import Path

import pandas as pd
import streamlit as st

from zlab.dashboard import data
from zlab.dashboard.data import Snapshot, Source
from zlab.dashboard.figures.activity import NUM_BINS, activity_figure, holders_figure
from zlab.dashboard.figures.occupancy import Shown, occupancy_figure
from zlab.dashboard.figures.style import CONFIG
from zlab.dashboard.views.navigation import area_panel, open_clicked, open_row, step_panel
from zlab.dashboard.views.page import (
    blocks_of_page,
    draw_to_zoom,
    error_in_words,
    exports,
    header,
    mark_figure,
    number_from_url,
    themed,
    window_of,
    zoom_fields,
)
from zlab.dashboard.views.requests import explanation
from zlab.traces.occupancy import STATES, Occupancy, blocks_of, life_of
from zlab.traces.palette import BLOCK_LOOKS
from zlab.traces.timeline import step_series

COLOURS = ("state", "request")


def show(source: Source, root: Path) -> None:
    """Draw the view of one recording; what is simulated from here goes below `root`."""
    with error_in_words(source.label):
        with st.spinner("Replaying the blocks …"):
            snapshot = Snapshot(source.folder)
            occupancy = data.occupancy(snapshot)
        if not occupancy.times.last_s:
            st.info(
                "No step has been recorded yet. Open the view **Live** to follow the run as it "
                "is written."
            )
            return
        header(source.label, snapshot)
        _draw(snapshot, occupancy, root)


def _draw(snapshot: Snapshot, occupancy: Occupancy, root: Path) -> None:
    holdings, marks = data.holdings(snapshot), data.marks(snapshot)
    zoom_fields(with_blocks=True, last_s=occupancy.times.last_s)
    step_panel(snapshot, occupancy.times.last_s)
    columns = st.columns([1.2, 1, 1], vertical_alignment="bottom")
    with columns[0]:
        colour_by = st.segmented_control(
            "Colour blocks by",
            COLOURS,
            default="state",
            required=True,
            key="colour",
            bind="query-params",
        )
    with columns[1]:
        request = number_from_url(
            "Follow request",
            "request",
            0,
            True,
            "Its blocks stand out, and it is explained below the picture",
        )
    with columns[2]:
        block = number_from_url(
            "Follow block", "block", 0, True, "Its life is shown below the figure"
        )
    window = window_of(occupancy.times.last_s)
    shown = Shown(window, blocks_of_page(occupancy.num_blocks))
    figure = occupancy_figure(occupancy, holdings, marks, shown, str(colour_by), request)
    mark_figure(figure, snapshot, window)
    st.caption(_how_to_read(shown, occupancy, str(colour_by), request))
    draw_to_zoom(
        figure,
        "pool",
        (shown, colour_by, request, block),
        "Block states over time",
        takes_blocks=True,
        opens=True,
    )
    area_panel(snapshot, window)
    if block is not None:
        _life(occupancy, int(block))
    if request is not None:
        _held(occupancy, int(request))
        explanation(snapshot, root, with_field=False)
    pool = (occupancy.num_blocks, occupancy.block_size)
    series = step_series(data.steps(snapshot), occupancy.times, window, NUM_BINS, pool)
    activity = mark_figure(activity_figure(series, pool), snapshot, window)
    st.subheader("What the steps did", anchor=False)
    draw_to_zoom(
        activity, "activity", window, "Requests, tokens a second and unused slots over time"
    )
    st.subheader("Who holds most", anchor=False)
    st.caption(
        "Requests stacked by the blocks that each owns alone. Click a layer to follow its request; "
        "drag to pan."
    )
    holders = mark_figure(holders_figure(occupancy, window, request), snapshot, window)
    key = f"holders|{window}|{request}"
    st.plotly_chart(
        themed(holders),
        key=key,
        config=CONFIG,
        on_select=open_clicked(key),
        selection_mode="points",
        alt="Blocks held by request",
    )
    edges = pd.DataFrame(
        {"second": series.centres_s, "output_tokens_per_s": series.output_tokens_per_s}
        | series.peaks
    )
    counts = pd.DataFrame(occupancy.counts, columns=list(STATES))
    counts.insert(0, "from_second", occupancy.change_s)
    exports(
        snapshot.folder,
        {"Blocks": figure, "Steps": activity, "Who holds most": holders},
        {"blocks by state": counts, "steps": edges},
    )


def _how_to_read(shown: Shown, occupancy: Occupancy, colour_by: str, request: int | None) -> str:
    """Say what the picture shows and what a zoom would add."""
    span = (
        f"{shown.window_s[0]:.4g} to {shown.window_s[1]:.4g} s, blocks {shown.blocks[0]} to "
        f"{shown.blocks[1] - 1}"
    )
    if request is not None:
        what = f"Blocks of r{request} in orange, those of others in grey."
    elif colour_by == "request":
        what = (
            "A colour for each request that holds a block (colours repeat); hatched: shared; "
            "dotted: cached."
        )
    else:
        what = (
            "Each row is a block, from left to right is time; colours and hatches as in the legend."
        )
    per_row = -(-shown.num_blocks // 400)
    coarse = f" A row stands for {per_row} blocks until you zoom in." if per_row > 1 else ""
    return (
        f"{what} Showing {span} of {occupancy.num_blocks}.{coarse} "
        "**Draw a box to zoom in, click a block to read about its holder.**"
    )


def _life(occupancy: Occupancy, block: int) -> None:
    """Show one block's life as a table."""
    if block >= occupancy.num_blocks:
        st.warning(
            f"There is no block {block}: the pool has {occupancy.num_blocks}, numbered from 0."
        )
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
    st.caption("Select a row to follow the request that brought the change about.")
    key = f"life-{block}"
    actors = [-1 if stretch.actor is None else stretch.actor for stretch in life]
    st.dataframe(
        rows.head(2000),
        hide_index=True,
        height=240,
        key=key,
        on_select=open_row(key, actors),
        selection_mode="single-row",
    )


def _held(occupancy: Occupancy, request: int) -> None:
    """Say which blocks a request held."""
    held = blocks_of(occupancy, request)
    if not len(held.block):
        st.warning(f"r{request} never held a block in this recording.")
        return
    first, last = held.start_s.min(), held.end_s.max()
    st.caption(
        f"r{request} held {len(set(held.block.tolist()))} different blocks between {first:.4g} "
        f"and {last:.4g} s."
    )
