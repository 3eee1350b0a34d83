import json
from base64 import b64decode
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("plotly")

from dashboard.figures.activity import HOLDER_BINS, NUM_BINS, activity_figure, holders_figure, top_holders
from dashboard.figures.compare import (
    LATENCIES,
    TABLE,
    cdf,
    comparison,
    latency_figure,
    pareto_edge,
    strips_figure,
    sweep_map,
    tradeoff_figure,
    value_of,
)
from dashboard.figures.occupancy import PICTURE, Shown, hover_grid, occupancy_figure, request_cells, state_cells
from dashboard.figures.requests import MAX_BARS, ROWS, gantt, phase_totals, pick_rows, totals_figure, visible
from dashboard.figures.style import MAX_MARKS, finish, num_marks
from dashboard.figures.trust import AROUND, around, error_figure, error_table, step_errors, times_figure
from dashboard.load import read_marks
from tests.dashboard.recordings import NAMES, folder
from tests.traces.test_picture import decoded
from traces.detail import lives_at
from traces.follow import blocks_of
from traces.holding import read_holdings
from traces.metrics import time_to_first_token, wasted_slots
from traces.occupancy import CACHED, FREE, SHARED, STATES, read_occupancy
from traces.palette import BLOCK_LOOKS
from traces.phases import PHASES, PREEMPTED, read_phases
from traces.recording import Recording, first_difference
from traces.series import COLUMNS, step_series


class Whole:
    """One recording with all that figures need of it."""

    def __init__(self, name: str) -> None:
        self.recording = Recording(folder(name))
        self.occupancy = read_occupancy(self.recording)
        self.holdings = read_holdings(self.recording)
        self.marks = read_marks(self.recording)
        self.phases = read_phases(self.recording)
        self.requests = self.recording.table("requests")
        self.steps = self.recording.table("steps")
        self.summary: dict[str, Any] = self.recording.manifest["summary"]
        self.shown = Shown(self.occupancy.span_s, (0, self.occupancy.num_blocks))


@pytest.fixture(scope="module", params=list(NAMES))
def whole(request: pytest.FixtureRequest) -> Whole:
    return Whole(request.param)


@pytest.fixture(scope="module")
def hybrid() -> Whole:
    return Whole("hybrid")


def test_cells_of_a_close_look_are_the_pools_state(whole: Whole) -> None:
    """A window of few steps: every column lies inside one step and shows every block as it was then."""
    times = whole.occupancy.times
    for first in (50, 400):
        window = (float(times.start_s[first]), float(times.end_s[first + 4]))
        cells = state_cells(whole.occupancy, Shown(window, (0, whole.occupancy.num_blocks)))
        edges = np.linspace(*window, PICTURE[0] + 1)
        middle = (edges[1:] + edges[:-1]) / 2
        truth = whole.occupancy.lives.state[lives_at(whole.occupancy, middle)]
        changes = np.concatenate((times.start_s[first : first + 5], times.end_s[first : first + 5]))
        clear = np.array([np.abs(changes - m).min() > (edges[1] - edges[0]) for m in middle])
        assert clear.sum() > 100
        assert (cells[:, clear] == truth[:, clear]).all()


def test_the_image_in_the_figure_is_the_cells(whole: Whole) -> None:
    figure = occupancy_figure(whole.occupancy, whole.holdings, whole.marks, whole.shown)
    image = figure.layout.images[0]
    pixels, palette = decoded(b64decode(image.source.split(",", 1)[1]))
    cells = state_cells(whole.occupancy, whole.shown)
    rows, columns = (pixels.shape[i] // cells.shape[i] for i in (0, 1))
    assert (pixels[::rows, ::columns] // 2 == cells).all()
    colours = [f"#{palette[i : i + 3].hex()}" for i in range(0, len(palette), 6)]
    assert colours[1:] == [look.colour for look in BLOCK_LOOKS.values()][1:]  # free: a tint of the background
    assert (image.x, image.sizex) == (0.0, whole.occupancy.times.last_s)
    assert (image.y, image.sizey) == (-0.5, whole.occupancy.num_blocks)


def test_request_cells_name_the_owner(whole: Whole) -> None:
    cells = request_cells(whole.occupancy, whole.shown)
    edges = np.linspace(*whole.shown.window_s, PICTURE[0] + 1)
    index = lives_at(whole.occupancy, (edges[1:] + edges[:-1]) / 2)
    owner, state = whole.occupancy.lives.owner[index], whole.occupancy.lives.state[index]
    assert (cells[owner >= 0] == 3 + owner[owner >= 0] % 8).all()
    assert ((cells == 1) == (state == SHARED)).all()
    assert ((cells == 2) == (state == CACHED)).all()


def test_a_followed_request_stands_out(hybrid: Whole) -> None:
    figure = occupancy_figure(hybrid.occupancy, hybrid.holdings, hybrid.marks, hybrid.shown, "state", 17)
    pixels, _ = decoded(b64decode(figure.layout.images[0].source.split(",", 1)[1]))
    per_block = pixels.shape[0] // hybrid.occupancy.num_blocks
    rows = {int(row) // per_block for row in np.flatnonzero((pixels // 2 == 2).any(axis=1))}
    assert rows == set(blocks_of(hybrid.occupancy, 17).block.tolist())


def test_hover_words_are_the_state_at_the_moment(whole: Whole) -> None:
    shown = Shown(whole.shown.window_s, (3, 40))
    moments, rows, words = hover_grid(whole.occupancy, whole.holdings, shown)
    assert rows.tolist() == list(range(3, 40))
    index = lives_at(whole.occupancy, moments)
    lives = whole.occupancy.lives
    for r, block in enumerate(range(3, 40)):
        for c in range(len(moments)):
            at = index[block, c]
            assert words[r][c].startswith(f"block {block}: {BLOCK_LOOKS[STATES[lives.state[at]]].words}")
            assert (f"held by r{lives.owner[at]}" in words[r][c]) == (lives.owner[at] >= 0)


def test_hover_words_of_several_blocks_count_them(whole: Whole) -> None:
    shown = Shown(whole.shown.window_s, (0, 90))
    moments, rows, words = hover_grid(whole.occupancy, whole.holdings, shown)
    bounds = np.arange(len(rows) + 1) * 90 // len(rows)
    state = whole.occupancy.lives.state[lives_at(whole.occupancy, moments)]
    for r in (0, 20, len(rows) - 1):
        low, high = bounds[r], bounds[r + 1]
        if high - low == 1:
            continue
        for c in range(len(moments)):
            assert words[r][c].startswith(f"blocks {low} to {high - 1}")
            for code, name in enumerate(STATES):
                count = int((state[low:high, c] == code).sum())
                assert (f"{count} {BLOCK_LOOKS[name].words}" in words[r][c]) == (count > 0)


def test_marks_hide_no_preemption_and_no_full_pool(whole: Whole) -> None:
    figure = occupancy_figure(whole.occupancy, whole.holdings, whole.marks, whole.shown)
    signs = {trace.name: trace for trace in figure.data if "mode" in trace and trace.mode == "markers"}
    assert sum(signs["preemption"].customdata) == whole.summary["preemptions"] > 0
    assert sum(signs["compression"].customdata) == whole.summary["compressions"]
    available = whole.occupancy.counts[:, FREE] + whole.occupancy.counts[:, CACHED]
    assert (available == 0).any()
    assert len(signs["no block available"].x) > 0


def test_the_stack_is_the_pool(whole: Whole) -> None:
    figure = occupancy_figure(whole.occupancy, whole.holdings, whole.marks, whole.shown)
    layers = [trace for trace in figure.data if "stackgroup" in trace and trace.stackgroup == "blocks"]
    assert len(layers) == len(STATES)
    assert (np.sum([layer.y for layer in layers], axis=0) == whole.occupancy.num_blocks).all()


def test_activity_shows_the_steps_peaks_and_waste(whole: Whole) -> None:
    pool = (whole.occupancy.num_blocks, whole.occupancy.block_size)
    series = step_series(
        whole.recording.table("steps", COLUMNS), whole.occupancy.times, whole.occupancy.span_s, NUM_BINS, pool
    )
    assert series.peaks["running"].max() == whole.summary["running_max"]
    assert series.peaks["waiting"].max() == whole.steps["waiting"].to_numpy().max()
    assert series.wasted_slots.max() == wasted_slots(whole.steps, *pool).max()
    width = series.edges_s[1] - series.edges_s[0]
    assert (series.output_tokens_per_s * width).sum() == pytest.approx(whole.summary["output_tokens"])
    figure = activity_figure(series, pool)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines["running"].y) == series.peaks["running"].tolist()
    assert max(lines["unused slots in owned blocks"].y) == pytest.approx(
        whole.summary["wasted_slots_max"] * 100, rel=1e-3
    )


def test_holders_add_up_to_the_pool_in_use(whole: Whole) -> None:
    numbers, blocks = top_holders(whole.occupancy, whole.holdings, whole.occupancy.span_s)
    assert (np.diff(blocks.sum(axis=1)) <= 0).all()
    figure = holders_figure(whole.occupancy, whole.holdings, whole.occupancy.span_s)
    assert {trace.name for trace in figure.data} == {"all other requests", *(f"r{n}" for n in numbers)}
    moments = np.linspace(*whole.occupancy.span_s, HOLDER_BINS)
    at = np.searchsorted(whole.occupancy.change_s, moments, side="right") - 1
    used = whole.occupancy.num_blocks - whole.occupancy.counts[at][:, [FREE, CACHED]].sum(axis=1)
    stack = np.sum([trace.y for trace in figure.data], axis=0)
    assert (stack >= used).all()  # a shared block counts for each of its owners
    for trace in figure.data:
        if trace.name != "all other requests":
            assert set(trace.customdata) == {int(trace.name[1:])}


def test_gantt_bars_are_the_phases(whole: Whole) -> None:
    numbers = np.sort(whole.requests["number"].to_numpy())
    rows = pick_rows(numbers, 20)
    figure = gantt(whole.phases, rows, whole.occupancy.span_s, int(rows[3]))
    mine = whole.phases.of(rows)
    assert sum(len(trace.x) for trace in figure.data) == len(mine.request)
    assert list(figure.layout.yaxis.categoryarray) == [f"r{n}" for n in rows[::-1]]
    preempted = [trace for trace in figure.data if trace.name.startswith("preempted")]
    assert sum(len(trace.x) for trace in preempted) == (mine.phase == PREEMPTED).sum()


def test_gantt_keeps_preemptions_when_it_must_leave_out(hybrid: Whole) -> None:
    numbers = hybrid.requests["number"].to_numpy()
    many = hybrid.phases
    for _ in range(5):  # as if each had lived 32 times
        many = type(many)(*(np.concatenate((column, column)) for column in vars(many).values()))
    shown = visible(many, numbers, hybrid.occupancy.span_s)
    assert len(many.request) > MAX_BARS == len(shown.request)
    assert (shown.phase == PREEMPTED).sum() == (many.phase == PREEMPTED).sum() > 0


def test_totals_equal_the_requests_table(whole: Whole) -> None:
    numbers = whole.requests["number"].to_numpy()
    totals = phase_totals(whole.phases, numbers)
    for phase, seconds in zip(PHASES, totals, strict=True):
        assert seconds == pytest.approx(whole.requests[f"{phase}_s"].to_numpy().sum(), abs=1e-6)
    figure = totals_figure(whole.phases, numbers, "all")
    assert sum(trace.x[0] for trace in figure.data) == pytest.approx(totals.sum())


def test_cdf_equals_metrics(whole: Whole) -> None:
    waits = time_to_first_token(whole.requests)
    x, y = cdf(waits)
    assert x[0] == pytest.approx(waits.min(), rel=1e-3)
    assert x[-1] == pytest.approx(waits.max(), rel=1e-3)
    values = np.array(x, dtype=float)
    assert np.interp(0.5, y, values) == pytest.approx(whole.summary["ttft_s"]["p50"], rel=2e-2)
    assert np.interp(0.99, y, values) == pytest.approx(whole.summary["ttft_s"]["p99"], rel=2e-2)
    for key in LATENCIES:
        assert len(latency_figure({"one": whole.requests}, key).data[0].x) > 50
    assert cdf(np.array([np.nan])) == ([], [])


def test_comparison_takes_its_figures_from_the_summaries() -> None:
    summaries = {name: Whole(name).summary for name in ("full-kv", "hybrid")}
    table = comparison(summaries)
    assert len(table) == len(TABLE)
    for (_, row), figure in zip(table.iterrows(), TABLE, strict=True):
        one, other = (value_of(summaries[name], figure.key) for name in ("full-kv", "hybrid"))
        assert row["full-kv"] == one or (one is None and pd.isna(row["full-kv"]))
        if one and other is not None:
            assert row["hybrid vs full-kv, %"] == pytest.approx((other / one - 1) * 100)


def test_pareto_edge_is_what_no_other_point_beats() -> None:
    rng = np.random.default_rng(4)
    points = [(float(x), float(y)) for x, y in rng.random((200, 2))]
    edge = set(pareto_edge(points))
    for index, (x, y) in enumerate(points):
        beaten = any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert (index in edge) == (not beaten)
    assert pareto_edge([]) == []
    figure = tradeoff_figure({"a": (1.0, 10.0), "b": (2.0, 5.0), "c": (None, 1.0)}, "p99", "s")
    assert list(figure.data[0].x) == [1.0]
    assert {trace.name for trace in figure.data} == {"Pareto edge", "a", "b"}


def test_strips_share_a_time_axis() -> None:
    pools = {name: Whole(name).occupancy for name in NAMES}
    figure = strips_figure(pools)
    assert len(figure.layout.images) == len(pools)
    until = max(pool.times.last_s for pool in pools.values())
    assert tuple(figure.layout.xaxis.range) == (0, until)
    assert [image.sizex for image in figure.layout.images] == [pool.times.last_s for pool in pools.values()]


def test_sweep_map_holds_the_rows() -> None:
    rows = pd.DataFrame({"blocks": [1, 1, 2, 2], "slots": ["a", "b", "a", "b"], "tokens_per_s": [1.0, 2.0, 3.0, 4.0]})
    heat = sweep_map(rows, "blocks", "slots", "tokens_per_s").data[0]
    assert [list(line) for line in heat.z] == [[1.0, 3.0], [2.0, 4.0]]
    assert list(heat.x) == ["1", "2"]
    assert list(heat.y) == ["a", "b"]


def test_trust_finds_the_first_difference_and_the_error() -> None:
    one, other = Whole("full-kv"), Whole("hybrid")
    events = [w.recording.table("events") for w in (one, other)]
    difference = first_difference(*events)
    assert difference is not None
    left, right = (around(e, one.recording.manifest, difference.index) for e in events)
    before = min(AROUND, difference.index)
    assert (left.iloc[:before, 2:].to_numpy() == right.iloc[:before, 2:].to_numpy()).all()
    assert (left.iloc[before, 2:].to_numpy() != right.iloc[before, 2:].to_numpy()).any()
    assert left.iloc[before, 1] == "→ differs"
    start, end = (one.steps[name].to_numpy() for name in ("start_s", "end_s"))
    place = one.steps.column_names.index("end_s")
    slower = one.steps.set_column(place, "end_s", [start + 2 * (end - start)])
    errors = step_errors(one.steps, slower, None)
    assert errors.total == pytest.approx(-0.5)
    assert error_table(errors)["difference, %"].tolist() == pytest.approx([-50.0] * 10)
    assert len(times_figure(errors).data[0].x) == min(one.steps.num_rows, 2000)
    assert set(error_figure(errors).data[0].y) == {-50.0}
    assert len(step_errors(one.steps, other.steps, difference).step) == difference.step


def test_a_figure_that_is_too_large_is_refused(hybrid: Whole) -> None:
    figure = holders_figure(hybrid.occupancy, hybrid.holdings, hybrid.occupancy.span_s)
    assert num_marks(figure) <= MAX_MARKS
    figure.add_scatter(x=list(range(MAX_MARKS)), y=list(range(MAX_MARKS)))
    with pytest.raises(AssertionError, match="marks in one figure, at most 5000"):
        finish(figure, 100)


def test_figures_are_valid_json_without_nan(whole: Whole) -> None:
    numbers = np.sort(whole.requests["number"].to_numpy())
    for figure in (
        occupancy_figure(whole.occupancy, whole.holdings, whole.marks, whole.shown, "request"),
        gantt(whole.phases, numbers[:ROWS], whole.occupancy.span_s),
        latency_figure({"a": whole.requests}, "e2e_s"),
    ):
        json.loads(figure.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
