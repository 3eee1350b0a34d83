""""""

import json
import re
import sys
from base64 import b64decode
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from typer import Typer
from typer.testing import CliRunner

from tests.dashboard.cases import NAMES, folder
from tests.dashboard.test_block_picture import decoded
from zlab.cli.console import Command, MisuseError
from zlab.cli.replay import names_of, report
from zlab.dashboard.data import request_frame
from zlab.dashboard.figures.activity import (
    HOLDER_BINS,
    LATENCY_BINS,
    LINES,
    MAX_BARS,
    NUM_BINS,
    RATES,
    ROWS,
    activity_figure,
    bars,
    endings,
    gantt,
    hit_rate,
    holders_figure,
    latencies_figure,
    phase_totals,
    pick_rows,
    top_holders,
    totals_figure,
)
from zlab.dashboard.figures.compare import (
    LATENCIES,
    TABLE,
    cdf,
    comparison,
    latency_figure,
    pareto_edge,
    strip_of,
    strips_figure,
    sweep_map,
    tradeoff_figure,
    value_of,
)
from zlab.dashboard.figures.occupancy import (
    PICTURE,
    Shown,
    hover_grid,
    occupancy_figure,
    read_marks,
    request_cells,
    state_cells,
)
from zlab.dashboard.figures.style import INK, INKS, MAX_MARKS, finish, num_marks
from zlab.dashboard.figures.trust import (
    AROUND,
    around,
    error_figure,
    error_table,
    step_errors,
    times_figure,
)
from zlab.dashboard.report import run_figures, write_report
from zlab.traces.metrics import time_per_output_token, time_to_first_token, wasted_slots
from zlab.traces.occupancy import CACHED, FREE, SHARED, STATES, blocks_of, lives_at, read_occupancy
from zlab.traces.palette import BLOCK_LOOKS, CYCLE, MARK_LOOKS, PHASE_LOOKS
from zlab.traces.recording import FolderRecorder, Recording, RecordingError, first_difference
from zlab.traces.schema import PHASES, Phase
from zlab.traces.timeline import COLUMNS, Phases, read_holdings, read_phases, step_series

pytest.importorskip("plotly")


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
    """A window of few steps: every column lies inside one step and shows every block as it was
    then.
    """
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
    assert (
        colours[1:] == [look.colour for look in BLOCK_LOOKS.values()][1:]
    )  # free: a tint of the background
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
    figure = occupancy_figure(
        hybrid.occupancy, hybrid.holdings, hybrid.marks, hybrid.shown, "state", 17
    )
    pixels, _ = decoded(b64decode(figure.layout.images[0].source.split(",", 1)[1]))
    per_block = pixels.shape[0] // hybrid.occupancy.num_blocks
    rows = {int(row) // per_block for row in np.flatnonzero((pixels // 2 == 2).any(axis=1))}
    assert rows == set(blocks_of(hybrid.occupancy, 17).block.tolist())


def test_hover_words_are_the_state_at_the_moment(whole: Whole) -> None:
    shown = Shown(whole.shown.window_s, (3, 40))
    grid = hover_grid(whole.occupancy, whole.holdings, shown)
    moments, rows, words = grid.moments_s, grid.rows, grid.words
    assert rows.tolist() == list(range(3, 40))
    index = lives_at(whole.occupancy, moments)
    lives = whole.occupancy.lives
    for r, block in enumerate(range(3, 40)):
        for c in range(len(moments)):
            at = index[block, c]
            assert words[r][c].startswith(
                f"block {block}: {BLOCK_LOOKS[STATES[lives.state[at]]].words}"
            )
            assert (f"held by r{lives.owner[at]}" in words[r][c]) == (lives.owner[at] >= 0)


def test_hover_words_of_several_blocks_count_them(whole: Whole) -> None:
    shown = Shown(whole.shown.window_s, (0, 90))
    grid = hover_grid(whole.occupancy, whole.holdings, shown)
    moments, rows, words = grid.moments_s, grid.rows, grid.words
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
    signs = {
        trace.name: trace for trace in figure.data if "mode" in trace and trace.mode == "markers"
    }
    assert sum(map(int, signs["preemption"].text)) == whole.summary["preemptions"] > 0
    assert sum(map(int, signs["compression"].text)) == whole.summary["compressions"]
    available = whole.occupancy.counts[:, FREE] + whole.occupancy.counts[:, CACHED]
    assert (available == 0).any()
    assert len(signs["no block available"].x) > 0


def test_the_stack_is_the_pool(whole: Whole) -> None:
    figure = occupancy_figure(whole.occupancy, whole.holdings, whole.marks, whole.shown)
    layers = [
        trace for trace in figure.data if "stackgroup" in trace and trace.stackgroup == "blocks"
    ]
    assert len(layers) == len(STATES)
    stack = np.sum([layer.y for layer in layers], axis=0)
    assert np.abs(stack - whole.occupancy.num_blocks).max() < 1e-3


def test_activity_shows_the_steps_peaks_and_waste(whole: Whole) -> None:
    pool = (whole.occupancy.num_blocks, whole.occupancy.block_size)
    series = step_series(
        whole.recording.table("steps", COLUMNS),
        whole.occupancy.times,
        whole.occupancy.span_s,
        NUM_BINS,
        pool,
    )
    assert series.peaks["running"].max() == whole.summary["running_max"]
    assert series.peaks["waiting"].max() == whole.steps["waiting"].to_numpy().max()
    assert series.wasted_slots.max() == wasted_slots(whole.steps, *pool).max()
    width = series.edges_s[1] - series.edges_s[0]
    assert (series.output_tokens_per_s * width).sum() == pytest.approx(
        whole.summary["output_tokens"]
    )
    figure = activity_figure(series, pool)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines["running"].y) == series.peaks["running"].tolist()
    assert max(lines["unused slots in owned blocks"].y) == pytest.approx(
        whole.summary["wasted_slots_max"] * 100, rel=1e-3
    )


def test_holders_add_up_to_the_pool_in_use(whole: Whole) -> None:
    moments = np.linspace(*whole.occupancy.span_s, HOLDER_BINS)
    numbers, blocks = top_holders(whole.occupancy, moments)
    assert (np.diff(blocks.sum(axis=1)) <= 0).all()
    figure = holders_figure(whole.occupancy, whole.occupancy.span_s)
    others = {trace.name for trace in figure.data} - {f"r{n}" for n in numbers}
    assert others <= {"all other requests", "shared prefix"}
    at = np.searchsorted(whole.occupancy.change_s, moments, side="right") - 1
    used = whole.occupancy.num_blocks - whole.occupancy.counts[at][:, [FREE, CACHED]].sum(axis=1)
    stack = np.sum([trace.y for trace in figure.data], axis=0)
    assert (stack == used).all()
    for trace in figure.data:
        assert min(trace.y) >= 0
        if trace.name not in others:
            assert set(trace.customdata) == {int(trace.name[1:])}


def drawn_s(figure: go.Figure, words: str) -> float:
    """Seconds that the bars of a phase are long together."""
    return sum(sum(trace.x) for trace in figure.data if trace.type == "bar" and trace.name == words)


def test_gantt_bars_are_as_long_as_the_phases(whole: Whole) -> None:
    numbers = np.sort(whole.requests["number"].to_numpy())
    rows = pick_rows(numbers, 20)
    last = whole.occupancy.times.last_s
    for window in ((0.0, last), (0.4 * last, 0.45 * last)):
        figure = gantt(whole.phases, rows, window, int(rows[3]))
        mine = whole.phases.of(rows).within(window)
        length = np.minimum(mine.end_s, window[1]) - np.maximum(mine.start_s, window[0])
        for code, name in enumerate(PHASES):
            true = length[mine.phase == code].sum()
            assert drawn_s(figure, PHASE_LOOKS[name].words) == pytest.approx(true, rel=1e-5)
        assert list(figure.layout.yaxis.categoryarray) == [f"r{n}" for n in rows[::-1]]


def test_many_short_intervals_are_put_together_and_none_is_lost(hybrid: Whole) -> None:
    """Each request alternates between decode and compression for 4 ms in a run of 400 s."""
    numbers, turns = np.arange(40), 2000
    start = np.arange(turns) * 0.2
    phase = np.tile([Phase.DECODE.place, Phase.COMPRESSING.place], turns)
    edges = np.stack([start, start + 0.196], axis=1).ravel()
    many = Phases(
        np.repeat(numbers, 2 * turns),
        np.tile(phase, 40).astype(np.int8),
        np.tile(edges, 40),
        np.tile(np.append(edges[1:], 400.0), 40),
        np.zeros(80 * turns, dtype=np.int64),
    )
    shown = bars(many, numbers, (0.0, 400.0))
    assert 1000 < len(shown.request) <= MAX_BARS
    assert shown.count.sum() == len(many.request)
    compressing = shown.phase == Phase.COMPRESSING.place
    assert shown.length_s[compressing].sum() == pytest.approx(40 * turns * 0.004)
    for number in (0, 39):  # bars of a row do not overlap
        mine = shown.request == number
        order = np.argsort(shown.start_s[mine])
        ends = (shown.start_s + shown.length_s)[mine][order]
        assert (shown.start_s[mine][order][1:] >= ends[:-1] - 1e-9).all()


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
    assert len(table) == len(TABLE) - 1  # no accuracy is known, so no solved problems
    known = {name: {**one, "solved_per_s": 0.5} for name, one in summaries.items()}
    assert len(comparison(known)) == len(TABLE)
    shown = [figure for figure in TABLE if figure.key != "solved_per_s"]
    for (_, row), figure in zip(table.iterrows(), shown, strict=True):
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
    figure = strips_figure({name: strip_of(pool) for name, pool in pools.items()})
    assert len(figure.layout.images) == len(pools)
    until = max(pool.times.last_s for pool in pools.values())
    assert tuple(figure.layout.xaxis.range) == (0, until)
    assert [image.sizex for image in figure.layout.images] == [
        pool.times.last_s for pool in pools.values()
    ]


def test_sweep_map_holds_the_rows() -> None:
    rows = pd.DataFrame(
        {
            "blocks": [1, 1, 2, 2],
            "slots": ["a", "b", "a", "b"],
            "tokens_per_s": [1.0, 2.0, 3.0, 4.0],
        }
    )
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
    figure = holders_figure(hybrid.occupancy, hybrid.occupancy.span_s)
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


pytest.importorskip("plotly")


app = Typer(cls=Command)
app.command()(report)
app.command("other")(lambda: None)  # a group, as in the real command line


def test_the_page_stands_alone_and_has_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(
        app, ["report", folder("hybrid"), folder("full-kv"), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert done.output == f"2 recordings in {out}\n"
    page = out.read_text("utf-8")
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert titles[:5] == [
        "Throughput against the tail",
        "Time to first token",
        "Time per output token",
        "End to end",
        "The pools",
    ]
    assert len(titles) == 5 + 2 * 5
    assert page.count("Plotly.newPlot(") >= len(titles)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']http", page)
    assert "hybrid | full-kv" in page


def test_one_run_alone(tmp_path: Path) -> None:
    recording = Recording(folder("swapping"))
    write_report([("only", recording)], tmp_path / "report.html")
    assert "only: Who holds most" in (tmp_path / "report.html").read_text("utf-8")
    figures = run_figures(recording)
    assert len(figures) == 5
    assert all(0 < num_marks(figure) <= MAX_MARKS for figure in figures.values())


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    out = str(tmp_path / "report.html")
    none = CliRunner().invoke(app, ["report", str(tmp_path), "--out", out])
    assert none.exit_code == 1
    assert "not a recording" in none.output
    nowhere = CliRunner().invoke(
        app, ["report", folder("hybrid"), "--out", str(tmp_path / "no" / "where.html")]
    )
    assert nowhere.exit_code == 2
    assert "there is no folder" in nowhere.output
    with pytest.raises(ValueError, match="different names"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = sys.modules["zlab.cli.replay"]  # the package's attribute of this name is the command
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    done = CliRunner().invoke(
        app, ["report", folder("hybrid"), "--out", str(tmp_path / "report.html")]
    )
    assert done.exit_code == 2
    assert "pip install 'zipage-lab[report]'" in done.output


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    FolderRecorder(tmp_path / "begun", Recording(folder("hybrid")).manifest | {"complete": False})
    assert run_figures(Recording(tmp_path / "begun")) == {}
    (tmp_path / "begun" / "events" / "00000.parquet").write_bytes(b"PAR1 rubbish")
    with pytest.raises(RecordingError, match="cannot be read"):
        write_report([("begun", Recording(tmp_path / "begun"))], tmp_path / "report.html")


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert names_of(paths) == ["a/run", "b/run", f"{tmp_path.name}/c"]
    assert names_of(paths[1:]) == ["run", "c"]
    with pytest.raises(MisuseError, match="occurs twice"):
        names_of([tmp_path / "c", tmp_path / "a" / ".." / "c"])


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2) of "#rrggbb"."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast (WCAG 2.2) of two colours, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_marks_and_words_can_be_seen_on_a_dark_page() -> None:
    marks = {look.colour for name, look in BLOCK_LOOKS.items() if name != "free"}
    marks |= {look.colour for look in (*PHASE_LOOKS.values(), *MARK_LOOKS.values())}
    marks |= {*CYCLE, INK, *(line[2] for line in (*LINES, *RATES))}
    for dark in ("#0e1117", "#191919"):
        assert {mark for mark in marks if contrast(mark, dark) < 3} == set()
        assert contrast(INKS["dark"], dark) >= 4.5
    assert contrast(INKS["light"], "#ffffff") >= 4.5


def test_phases_can_be_told_apart_in_grey() -> None:
    for (one, look), (other, that) in combinations(PHASE_LOOKS.items(), 2):
        if {one, other} & {"queued", "decode", "preempted"}:
            told = look.hatch != that.hatch or contrast(look.colour, that.colour) >= 1.5
            assert told, (one, other)


def test_latencies_over_time_are_those_of_the_requests_table(whole: Whole) -> None:
    frame = request_frame(whole.requests)
    window = whole.occupancy.span_s
    figure = latencies_figure(frame, window, {"ttft": 0.25, "tpot": None, "queue": None})
    assert [shape.y0 for shape in figure.layout.shapes] == [0.25]
    edges = np.linspace(*window, LATENCY_BINS + 1)
    table = whole.requests
    wanted = (
        ("arrival_s", time_to_first_token(table)),
        ("finish_s", time_per_output_token(table)),
        ("arrival_s", table["queued_s"].to_numpy()),
    )
    for row, (moment, values) in enumerate(wanted):
        at = np.clip(np.searchsorted(edges, table[moment].to_numpy(), "right") - 1, 0, 59)
        for mark, trace in zip((50, 90, 99), figure.data[3 * row : 3 * row + 3], strict=True):
            for place in range(LATENCY_BINS):
                mine = values[(at == place) & ~np.isnan(values)]
                drawn = trace.y[place]
                assert (drawn is None) == (len(mine) == 0)
                if len(mine):
                    assert drawn == pytest.approx(np.percentile(mine, mark), rel=1e-3, abs=1e-9)
    hits = hit_rate(frame, np.array(window))
    known = frame["prefix_hit_tokens"].sum() / frame["prompt_tokens"].sum()
    assert hits.tolist() == pytest.approx([known])
    assert endings(frame)["requests"].sum() == len(frame)
    assert num_marks(figure) <= MAX_MARKS
