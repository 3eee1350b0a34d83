"""Bounds on counts and bytes for a recording of 20,000 requests x 100,000 steps x 4,096 blocks.
Times: benchmarks/.
"""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

import plotly.graph_objects as go

from tests.dashboard.large_recording import STEP_S, lane_offset, write_large
from zlab.dashboard.figures.activity import (
    NUM_BINS,
    activity_figure,
    gantt,
    holders_figure,
    pick_rows,
    totals_figure,
)
from zlab.dashboard.figures.compare import latency_figure, strip_of, strips_figure
from zlab.dashboard.figures.occupancy import Shown, occupancy_figure, read_marks, state_cells
from zlab.dashboard.figures.style import MAX_MARKS, num_bytes, num_marks
from zlab.dashboard.figures.trust import error_figure, step_errors, times_figure
from zlab.traces.occupancy import (
    FREE,
    OWNED,
    Occupancy,
    count_marks,
    life_of,
    lives_at,
    read_occupancy,
)
from zlab.traces.recording import Recording
from zlab.traces.schema import Phase
from zlab.traces.timeline import (
    COLUMNS,
    Holdings,
    Phases,
    read_holdings,
    read_phases,
    step_series,
)

VIEW_BYTES = 3_000_000


class Large:
    """The recording and what its views need."""

    def __init__(self, folder: Path) -> None:
        self.rows = write_large(folder)
        self.recording = Recording(folder)
        self.occupancy: Occupancy = read_occupancy(self.recording)
        self.holdings: Holdings = read_holdings(self.recording)
        self.marks = read_marks(self.recording)
        self.phases: Phases = read_phases(self.recording)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    return Large(tmp_path_factory.mktemp("large") / "run")


def hold(*figures: go.Figure) -> None:
    """The bounds: marks of each figure, bytes of a view's figures together."""
    for figure in figures:
        assert 0 < num_marks(figure) <= MAX_MARKS
    assert sum(num_bytes(figure) for figure in figures) <= VIEW_BYTES


def test_it_is_as_large_as_asked(large: Large) -> None:
    assert large.rows["requests"] == 20_000
    assert large.rows["steps"] == 100_000
    assert large.rows["blocks"] > 4_000_000
    assert large.occupancy.num_blocks == 4_096
    assert (large.occupancy.counts.sum(axis=1) == 4_096).all()
    assert len(np.unique(large.phases.request)) == 20_000


@pytest.mark.parametrize("window", [(0.0, 1000.0), (400.0, 440.0), (400.0, 400.5)])
@pytest.mark.parametrize("blocks", [(0, 4096), (1000, 1040)])
@pytest.mark.parametrize("colour_by", ["state", "request"])
def test_occupancy_view(
    large: Large, window: tuple[float, float], blocks: tuple[int, int], colour_by: str
) -> None:
    pool = (large.occupancy.num_blocks, large.occupancy.block_size)
    shown = Shown(window, blocks)
    series = step_series(
        large.recording.table("steps", COLUMNS), large.occupancy.times, window, NUM_BINS, pool
    )
    hold(
        occupancy_figure(large.occupancy, large.holdings, large.marks, shown, colour_by),
        activity_figure(series, pool),
        holders_figure(large.occupancy, window),
    )


def test_requests_view(large: Large) -> None:
    numbers = np.arange(20_000)
    for first in (0, 19_980):
        hold(
            gantt(large.phases, pick_rows(numbers, first), large.occupancy.span_s),
            totals_figure(large.phases, numbers, "all"),
        )


def test_compare_and_trust_views(large: Large) -> None:
    requests = large.recording.table("requests")
    steps = large.recording.table("steps", ("step", "start_s", "end_s"))
    errors = step_errors(steps, steps, None)
    hold(*(latency_figure(dict.fromkeys("abcdef", requests), key) for key in ("ttft_s", "e2e_s")))
    hold(strips_figure(dict.fromkeys("abcdef", strip_of(large.occupancy))))
    hold(times_figure(errors), error_figure(errors))


def test_a_zoom_brings_detail(large: Large) -> None:
    """Zoomed in, a cell is one block in less than a step, and is what the timetable says."""
    lane, block = 200, 200 * 8 + 1  # the second block of a lane: taken in the lane's first step
    start = int(lane_offset(np.array([lane]))[0])
    window = (start * STEP_S - 0.05, start * STEP_S + 0.05)
    cells = state_cells(large.occupancy, Shown(window, (block, block + 1)))[0]
    assert (cells[:490] == FREE).all()
    assert (cells[510:] == OWNED).all()
    first = next(stretch for stretch in life_of(large.occupancy, block) if stretch.state == "owned")
    assert first.start_s == pytest.approx(start * STEP_S)
    assert first.owner == lane


def test_nothing_is_lost_from_afar(large: Large) -> None:
    preempted = large.phases.phase == Phase.PREEMPTED.place
    moments = large.marks.preempted_s
    assert len(moments) == preempted.sum() == 20_000
    assert count_marks(moments, large.occupancy.span_s, 150).sum() == len(moments)
    decode = large.phases.totals(np.arange(20_000))[:, Phase.DECODE.place]
    assert decode.min() > 10
    alive = large.occupancy.lives.owner[lives_at(large.occupancy, np.array([500.0]))]
    assert len(np.unique(alive)) > 500
