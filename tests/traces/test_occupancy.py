""""""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.cases import BLOCK, LIMITS, POLICIES, conversations, manifest_of, watched
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.spec import load_policy
from zlab.sim.cost_model import Change
from zlab.sim.replay import replay
from zlab.traces import occupancy as occupancies
from zlab.traces.occupancy import (
    CACHED,
    FREE,
    HELD,
    OWNED,
    SHARED,
    STATES,
    TARGET,
    Occupancy,
    Overview,
    blocks_of,
    count_marks,
    fill_at,
    full_share,
    is_full,
    life_of,
    lives_at,
    mean_counts,
    painted,
    read_occupancy,
    replay_blocks,
    shares,
)
from zlab.traces.recording import FolderRecorder, Recording, RecordingError
from zlab.traces.schema import BlockState, EventKind
from zlab.traces.timeline import Names, event_times, holdings_of, step_times
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta


@pytest.fixture(scope="module")
def one_run() -> Occupancy:
    run = replay(conversations(), POLICIES[0][0], limits=LIMITS)
    return replay_blocks(run.blocks, run.events, run.steps, run.manifest)


@pytest.mark.parametrize(("policy", "limits"), POLICIES)
def test_replayed_pool_is_the_schedulers_own(policy: str, limits: SchedulerLimits) -> None:
    run, witness = watched(policy, limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    starts = run.steps["start_s"].to_numpy()
    assert len(starts) == len(witness.pools) > 200
    index = lives_at(occupancy, starts)
    truth = np.array(witness.pools)
    # A cached block stops being matchable, without an event, when a younger block of the same
    # content is registered.
    outdone = (occupancy.lives.state[index].T == CACHED) & (truth[:, :, 0] == FREE)
    assert ((truth[:, :, 0] == occupancy.lives.state[index].T) | outdone).all()
    assert outdone.mean() < (0.01 if policy.startswith("zipage") else 1e-9)
    assert (truth[:, :, 1] == occupancy.lives.refs[index].T).all()
    owner = occupancy.lives.owner[index]
    for step, tables in enumerate(witness.tables):
        holders: dict[int, list[int]] = {}
        for number, table in tables.items():
            for block in table:
                holders.setdefault(block, []).append(number)
        for block, numbers in holders.items():
            if len(numbers) == 1 and truth[step, block, 0] != TARGET:
                assert owner[block, step] == numbers[0]


def test_the_small_runs_use_every_state() -> None:
    seen = set()
    for policy, limits in (POLICIES[0], POLICIES[3]):
        run = replay(conversations(), policy, limits=limits)
        seen |= set(
            replay_blocks(run.blocks, run.events, run.steps, run.manifest).lives.state.tolist()
        )
    assert seen == {FREE, OWNED, SHARED, CACHED, TARGET, HELD}


@pytest.mark.parametrize(("policy", "limits"), POLICIES)
def test_counts_equal_the_steps_table(policy: str, limits: SchedulerLimits) -> None:
    run = replay(conversations(), policy, limits=limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    at = np.searchsorted(occupancy.change_s, run.steps["start_s"].to_numpy(), side="right") - 1
    counts = occupancy.counts[at]
    assert (occupancy.counts.sum(axis=1) == limits.num_blocks).all()
    assert (counts[:, FREE] + counts[:, CACHED] == run.steps["free_blocks"].to_numpy()).all()
    if not policy.startswith(
        "zipage"
    ):  # see above: there, cached blocks can turn free without an event
        assert (counts[:, CACHED] == run.steps["cached_blocks"].to_numpy()).all()


def test_cells_are_exact_shares(one_run: Occupancy) -> None:
    """Against a plain loop over lives, at an odd window and odd bins."""
    window, blocks, columns, rows = (
        (one_run.times.last_s * 0.2, one_run.times.last_s * 0.77),
        (5, 90),
        13,
        7,
    )
    found = shares(one_run, window, blocks, columns, rows)
    expected = np.zeros((len(STATES), rows, columns))
    edges = np.linspace(*window, columns + 1)
    lives = one_run.lives
    for block, start, end, state in zip(
        lives.block, lives.start_s, lives.end_s, lives.state, strict=True
    ):
        if blocks[0] <= block < blocks[1]:
            row = (int(block) - blocks[0]) * rows // (blocks[1] - blocks[0])
            expected[state, row] += np.clip(
                np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0, None
            )
    expected /= expected.sum(axis=0)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found.sum(axis=0) - 1).max() < 1e-5


def test_a_cell_of_one_step_and_one_block_is_the_pools_state(one_run: Occupancy) -> None:
    times = one_run.times
    for step in range(0, len(times.start_s), 97):
        window = (float(times.start_s[step]), float(times.end_s[step]))
        parts = shares(one_run, window, (0, one_run.num_blocks), 1, one_run.num_blocks)
        cells = painted(parts, one_block_a_row=True)[:, 0]
        middle = one_run.lives.state[lives_at(one_run, np.array([sum(window) / 2]))][:, 0]
        assert (cells == middle).all()


def test_mean_counts_are_the_shares_of_the_whole_pool(one_run: Occupancy) -> None:
    last = one_run.times.last_s
    for num_bins, window in ((1, (0.0, last)), (40, (0.0, last)), (7, (0.3 * last, 0.31 * last))):
        found = mean_counts(one_run, window, num_bins)[1]
        parts = shares(one_run, window, (0, one_run.num_blocks), num_bins, 1)[:, 0].T
        assert np.abs(found - parts * one_run.num_blocks).max() < 1e-3
        assert np.abs(found.sum(axis=1) - one_run.num_blocks).max() < 1e-6


def test_the_time_of_a_full_pool_is_counted_whole(one_run: Occupancy) -> None:
    until = np.append(one_run.change_s[1:], one_run.times.last_s)
    full_s = (until - one_run.change_s)[is_full(one_run)].sum()
    assert full_s > 0
    for num_bins in (1, 40):
        found = full_share(one_run, one_run.span_s, num_bins)
        assert found.mean() * one_run.times.last_s == pytest.approx(full_s)


def test_painted_areas_are_the_true_shares(one_run: Occupancy) -> None:
    """Also where a row stands for several blocks, and where a state is short."""
    whole = (0, one_run.num_blocks)
    for rows, columns in ((96, 50), (64, 50), (32, 200)):
        parts = shares(one_run, one_run.span_s, whole, columns, rows)
        cells = painted(parts, one_block_a_row=rows == 96)
        assert (np.take_along_axis(parts, cells[None].astype(np.intp), axis=0) > 0).all()
        for state in range(len(STATES)):
            true = parts[state].sum()
            assert (cells == state).sum() == pytest.approx(true, abs=0.015 * cells.size)
            assert ((cells == state).sum() > 0) == (true > 1)


def test_rows_of_one_held_and_one_free_block_do_not_flicker() -> None:
    parts = np.zeros((len(STATES), 40, 100), dtype=np.float32)
    noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, (40, 100))
    parts[OWNED], parts[FREE] = 0.5 + noise, 0.5 - noise
    cells = painted(parts, one_block_a_row=False)
    assert (cells == cells[:, :1]).all()
    assert (cells[:, 0] == OWNED).sum() == 20


def test_no_mark_is_lost() -> None:
    run = replay(conversations(), "full-kv", limits=LIMITS)
    names, times = Names(run.manifest), step_times(run.steps)
    moments = event_times(run.events, times, names)[names.kinds(run.events) == EventKind.PREEMPTED]
    assert len(moments) == run.summary["preemptions"] > 0
    for num_bins in (1, 7, 300):
        assert count_marks(moments, (0.0, times.last_s), num_bins).sum() == len(moments)


def test_wrong_tables_are_named() -> None:
    run = replay(conversations(10), "full-kv", limits=LIMITS)
    with pytest.raises(
        RecordingError, match=r"the events name \d+ block changes, the table 'blocks' has \d+"
    ):
        replay_blocks(run.blocks.slice(0, 20), run.events, run.steps, run.manifest)
    with pytest.raises(RecordingError, match=r"names block .* of a pool of 2"):
        replay_blocks(run.blocks, run.events, run.steps, manifest_of(run) | {"num_blocks": 2})
    with pytest.raises(RecordingError, match="no names under 'kinds'"):
        replay_blocks(run.blocks, run.events, run.steps, manifest_of(run) | {"kinds": {}})
    with pytest.raises(RecordingError, match="not steps 0 to"):
        replay_blocks(run.blocks, run.events, run.steps.slice(1), run.manifest)
    with pytest.raises(RecordingError, match="whole numbers above 0"):
        replay_blocks(run.blocks, run.events, run.steps, manifest_of(run) | {"block_size": "256"})


@pytest.mark.parametrize("cut", [0.0, 0.31, 0.66])
def test_a_run_that_is_still_going_on(tmp_path: Path, cut: float) -> None:
    """Its tables are written at different moments: what they agree on equals the whole run up to
    there.
    """
    run = replay(conversations(), POLICIES[0][0], limits=LIMITS)
    whole = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    recorder = FolderRecorder(tmp_path, manifest_of(run) | {"complete": False}, rows_per_part=1)
    for name, share in (("events", cut), ("blocks", cut * 0.9), ("steps", min(1.0, cut * 1.2))):
        table = getattr(run, name).slice(0, int(getattr(run, name).num_rows * share))
        recorder.write(name, {column: table[column] for column in table.column_names})
    part = read_occupancy(Recording(tmp_path))
    assert part.num_blocks == whole.num_blocks
    if cut == 0:
        assert set(part.lives.state.tolist()) == {FREE}
        return
    until = part.change_s[-2]  # the last moment may be half written
    moments = np.linspace(0, until, 50)[:-1]
    assert (
        part.lives.state[lives_at(part, moments)] == whole.lives.state[lives_at(whole, moments)]
    ).all()


def test_an_empty_run(one_run: Occupancy) -> None:
    empty = replace(one_run, num_blocks=3)
    run = replay(conversations(1), "full-kv", limits=LIMITS)
    manifest = manifest_of(run) | {"num_blocks": 3}
    empty = replay_blocks(
        run.blocks.slice(0, 0), run.events.slice(0, 0), run.steps.slice(0, 0), manifest
    )
    assert empty.span_s == (0.0, 0.0)
    assert empty.counts.tolist() == [[3, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(("policy", "limits"), [POLICIES[0], POLICIES[3], POLICIES[5], POLICIES[6]])
def test_the_blocks_of_a_request_are_its_table(policy: str, limits: SchedulerLimits) -> None:
    run, witness = watched(policy, limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    middle = (run.steps["start_s"].to_numpy() + run.steps["end_s"].to_numpy()) / 2
    compressing = run.steps["compressing"].to_numpy() > 0
    for number in range(0, 90, 7):
        held = blocks_of(occupancy, number)
        for step in range(0, len(middle), 23):
            if compressing[step]:
                continue  # fresh targets are held, but no part of the table yet
            now = (held.start_s <= middle[step]) & (held.end_s > middle[step])
            assert sorted(held.block[now].tolist()) == sorted(witness.tables[step].get(number, []))


@pytest.mark.parametrize(("policy", "limits"), [POLICIES[0], POLICIES[3], POLICIES[5]])
def test_fill_adds_up_to_the_tokens_that_are_stored(policy: str, limits: SchedulerLimits) -> None:
    run = replay(conversations(), policy, limits=limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    holdings = holdings_of(run.events, run.steps, run.manifest)
    middle = (run.steps["start_s"].to_numpy() + run.steps["end_s"].to_numpy()) / 2
    steps = np.flatnonzero(
        (run.steps["compressing"].to_numpy() == 0) & (run.steps["swaps"].to_numpy() == 0)
    )[::11]
    index = lives_at(occupancy, middle[steps])
    fill, state = fill_at(occupancy, holdings, middle[steps], index), occupancy.lives.state[index]
    assert (fill[state == FREE] == 0).all()
    assert (fill[(state == SHARED) | (state == CACHED)] == BLOCK).all()
    held = np.where((state == OWNED) | (state == SHARED), fill, 0).sum(axis=0)
    assert (held == run.steps["stored_tokens"].to_numpy()[steps]).all()


def test_a_blocks_life_is_whole() -> None:
    run = replay(conversations(), POLICIES[0][0], limits=LIMITS)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    life = life_of(occupancy, 5)
    assert life[0].start_s == 0
    assert life[-1].end_s == occupancy.times.last_s
    assert all(one.end_s == next_.start_s for one, next_ in itertools.pairwise(life))
    assert all((stretch.refs == 1) == (stretch.owner is not None) for stretch in life)
    with pytest.raises(IndexError, match=r"block 96 is not in 0\.\.95"):
        life_of(occupancy, 96)


@st.composite
def _crowds(draw: st.DrawFn) -> tuple[Workload, list[str], SchedulerLimits]:
    """Requests with few different prompts, so that they compute the same blocks at the same time,
    in a pool that is too small; and policies by turns.
    """
    size = draw(st.sampled_from([4, 16]))
    random = Random(draw(st.integers(0, 1000)))
    prompts = [[random.randrange(50) for _ in range(4 * size + n)] for n in range(3)]
    requests = []
    for number in range(draw(st.integers(5, 40))):
        ids = tuple(prompts[random.randrange(3)])
        arrival, output = 0.01 * number * random.random(), random.randrange(1, 3 * size)
        requests.append(
            TraceRequest(f"r{number}", len(ids), output, arrival_s=arrival, prompt_ids=ids)
        )
    requests.sort(key=lambda request: request.arrival_s or 0.0)
    budget = f"tokens={4 * size},window=4"
    policies = [
        "full-kv:window=4",
        "full-kv:comes_back=swap,window=4",
        "full-kv:prefix=none,window=4",
        f"hybrid:{budget}",
        f"hybrid:{budget},join=when_done,comes_back=swap,slotted=true",
        f"hybrid:{budget},join=blocking,slots=none,scorer=recent",
        f"zipage:{budget}",
    ]
    chosen = draw(st.lists(st.sampled_from(policies), min_size=1, max_size=3))
    limits = SchedulerLimits(
        num_blocks=draw(st.integers(12, 40)),
        block_size=size,
        max_batched_tokens=draw(st.sampled_from([size, 64, 512])),
        max_running=draw(st.sampled_from([4, 64])),
        max_model_len=2000,
        host_blocks=100,
    )
    return Workload(requests, WorkloadMeta(name="crowd")), chosen, limits


@settings(max_examples=60, deadline=None)
@given(_crowds())
def test_the_map_equals_the_steps_table_at_every_step(
    crowd: tuple[Workload, list[str], SchedulerLimits],
) -> None:
    """Every state of a block comes from a row of the recording."""
    workload, (first, *others), limits = crowd
    changes = [Change(15 * (at + 1), load_policy(spec)) for at, spec in enumerate(others)]
    run = replay(workload, first, limits=limits, changes=changes)
    reports = run.reports
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest, reports)
    start_s = run.steps["start_s"].to_numpy()
    lasts = np.append(start_s[1:] > start_s[:-1], True)  # a moment has the state of its last step
    places = np.searchsorted(occupancy.change_s, start_s, side="right") - 1
    counts = occupancy.counts[places][lasts]
    for states, column in (
        ((BlockState.CACHED,), "cached_blocks"),
        ((BlockState.CACHED, BlockState.FREE), "free_blocks"),
    ):
        of_map = counts[:, states].sum(axis=1)
        assert of_map.tolist() == run.steps[column].to_numpy()[lasts].tolist(), column


def test_a_superseded_copy_is_reported_and_no_decision() -> None:
    """Two requests compute the same prompt in one step. The first ends, its blocks are cached, and
    the second makes its own copy the one that is found.
    """
    ids = tuple(range(9))
    requests = [TraceRequest(f"r{n}", 9, 1 + 20 * n, arrival_s=0.0, prompt_ids=ids) for n in (0, 1)]
    limits = SchedulerLimits(
        num_blocks=20, block_size=4, max_batched_tokens=12, max_running=4, max_model_len=100
    )
    workload = Workload(requests, WorkloadMeta(name="two"))
    run = replay(workload, "full-kv:window=4", limits=limits)
    assert run.reports.num_rows > 0
    assert set(run.reports["state"].to_pylist()) == {BlockState.FREE}
    without = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    with_reports = replay_blocks(run.blocks, run.events, run.steps, run.manifest, run.reports)
    last = run.steps["cached_blocks"].to_pylist()[-1]
    assert with_reports.counts[-2, BlockState.CACHED] <= without.counts[-2, BlockState.CACHED]
    assert last < without.counts[:, BlockState.CACHED].max()


def test_an_overview_answers_for_many_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid gives the shares that the lives give: exactly for the whole run, and for a part as
    far as a cell of the grid can tell. Portions of a replay make no difference.
    """
    run = replay(conversations(), POLICIES[0][0], limits=LIMITS)
    plain = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    assert plain.overview is None
    monkeypatch.setattr(occupancies, "MANY_LIVES", 10)
    monkeypatch.setattr(occupancies, "LIVES_AT_ONCE", 100)
    monkeypatch.setattr(occupancies, "OVERVIEW_ROWS", 40)
    large = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    assert large.overview is not None
    for name in ("first", "start", "state", "refs", "owner", "actor", "row"):
        assert (getattr(large.lives, name) == getattr(plain.lives, name)).all(), name
    assert (large.counts == plain.counts).all()
    whole, num = large.span_s, large.num_blocks
    for window, blocks, rows, most in (
        (whole, (0, num), 40, 1e-5),
        ((0.3 * whole[1], 0.9 * whole[1]), (0, num), 40, 0.1),
        ((0.3 * whole[1], 0.31 * whole[1]), (0, num), 40, 1e-6),
        (whole, (3, 9), 6, 1e-6),
    ):
        found, true = (shares(one, window, blocks, 500, rows) for one in (large, plain))
        assert np.abs(found - true).max() < most
        assert np.abs(found.mean(axis=2) - true.mean(axis=2)).max() < most / 10


def test_a_replay_says_how_far_it_is(tmp_path: Path) -> None:
    replay(conversations(20), "full-kv", limits=LIMITS, out=tmp_path / "run")
    heard: list[float] = []
    read_occupancy(Recording(tmp_path / "run"), heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(1.0)


def test_an_overview_is_kept_beside_its_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found again, not for other parts, not where it is broken; and a folder that cannot be
    written to goes without.
    """
    monkeypatch.setattr(occupancies, "MANY_LIVES", 10)
    replay(conversations(20), "full-kv", limits=LIMITS, out=tmp_path / "run")
    recording = Recording(tmp_path / "run")
    made = read_occupancy(recording).overview
    assert made is not None
    assert Overview.load(recording) is None
    assert made.save(recording)
    found = Overview.load(recording)
    assert found is not None
    assert found.seconds.shape[2] == 1000
    for num_columns in (1000, 500):
        again, first = (one.shares((0.0, one.last_s), num_columns) for one in (found, made))
        assert np.abs(again - first).max() < 1e-6
    assert (found.num_blocks, found.last_s) == (made.num_blocks, made.last_s)
    kept = tmp_path / "run" / "overview.parquet"
    assert [path.name for path in kept.parent.glob("*.unfinished")] == []
    part = recording.parts("blocks")[0]
    os.utime(part, ns=(0, 1))
    assert Overview.load(recording) is None
    assert made.save(recording)
    kept.write_bytes(kept.read_bytes()[:100])
    assert Overview.load(recording) is None
    monkeypatch.setattr(os, "replace", _refuse)
    assert not made.save(recording)
    assert [path.name for path in kept.parent.glob("*.unfinished")] == []


def _refuse(*_: object) -> None:
    raise PermissionError("read-only")
