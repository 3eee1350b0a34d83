from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from policies.core.limits import Limits
from sim.replay import replay
from tests.traces.small_runs import LIMITS, POLICIES, conversations, manifest_of, watched
from traces.detail import count_marks, dominant, fullest_counts, is_full, lives_at, shares
from traces.moments import event_times, read_names, step_times
from traces.occupancy import CACHED, FREE, HELD, OWNED, SHARED, STATES, TARGET, Occupancy, read_occupancy, replay_blocks
from traces.recording import FolderRecorder, Recording, RecordingError


@pytest.fixture(scope="module")
def one_run() -> Occupancy:
    run = replay(conversations(), POLICIES[0][0], limits=LIMITS)
    return replay_blocks(run.blocks, run.events, run.steps, run.manifest)


@pytest.mark.parametrize(("policy", "limits"), POLICIES)
def test_replayed_pool_is_the_schedulers_own(policy: str, limits: Limits) -> None:
    run, witness = watched(policy, limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    starts = run.steps["start_s"].to_numpy()
    assert len(starts) == len(witness.pools) > 200
    index = lives_at(occupancy, starts)
    truth = np.array(witness.pools)
    # A cached block stops being matchable, without an event, when a younger block of the same content is registered.
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
        seen |= set(replay_blocks(run.blocks, run.events, run.steps, run.manifest).lives.state.tolist())
    assert seen == {FREE, OWNED, SHARED, CACHED, TARGET, HELD}


@pytest.mark.parametrize(("policy", "limits"), POLICIES)
def test_counts_equal_the_steps_table(policy: str, limits: Limits) -> None:
    run = replay(conversations(), policy, limits=limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    at = np.searchsorted(occupancy.change_s, run.steps["start_s"].to_numpy(), side="right") - 1
    counts = occupancy.counts[at]
    assert (occupancy.counts.sum(axis=1) == limits.num_blocks).all()
    assert (counts[:, FREE] + counts[:, CACHED] == run.steps["free_blocks"].to_numpy()).all()
    if not policy.startswith("zipage"):  # see above: there, cached blocks can turn free without an event
        assert (counts[:, CACHED] == run.steps["cached_blocks"].to_numpy()).all()


def test_cells_are_exact_shares(one_run: Occupancy) -> None:
    """Against a plain loop over lives, at an odd window and odd bins."""
    window, blocks, columns, rows = (one_run.times.last_s * 0.2, one_run.times.last_s * 0.77), (5, 90), 13, 7
    found = shares(one_run, window, blocks, columns, rows)
    expected = np.zeros((len(STATES), rows, columns))
    edges = np.linspace(*window, columns + 1)
    lives = one_run.lives
    for block, start, end, state in zip(lives.block, lives.start_s, lives.end_s, lives.state, strict=True):
        if blocks[0] <= block < blocks[1]:
            row = (int(block) - blocks[0]) * rows // (blocks[1] - blocks[0])
            expected[state, row] += np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0, None)
    expected /= expected.sum(axis=0)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found.sum(axis=0) - 1).max() < 1e-5


def test_a_cell_of_one_step_and_one_block_is_the_pools_state(one_run: Occupancy) -> None:
    times = one_run.times
    for step in range(0, len(times.start_s), 97):
        window = (float(times.start_s[step]), float(times.end_s[step]))
        cells = dominant(shares(one_run, window, (0, one_run.num_blocks), 1, one_run.num_blocks))[:, 0]
        middle = one_run.lives.state[lives_at(one_run, np.array([sum(window) / 2]))][:, 0]
        assert (cells == middle).all()


def test_coarse_counts_keep_the_fullest_moment(one_run: Occupancy) -> None:
    available = one_run.counts[:, FREE] + one_run.counts[:, CACHED]
    assert is_full(one_run).any()
    for num_bins in (1, 3, 40):
        edges, counts = fullest_counts(one_run, one_run.span_s, num_bins)
        shown = counts[:, FREE] + counts[:, CACHED]
        assert shown.min() == available.min() == 0
        for i in range(num_bins):
            inside = (one_run.change_s >= edges[i]) & (one_run.change_s < edges[i + 1])
            if inside.any():
                assert shown[i] <= available[inside].min()


def test_no_mark_is_lost() -> None:
    run = replay(conversations(), "full-kv", limits=LIMITS)
    names, times = read_names(run.manifest), step_times(run.steps)
    moments = event_times(run.events, times, names)[run.events["kind"].to_numpy() == names.kinds["preempted"]]
    assert len(moments) == run.summary["preemptions"] > 0
    for num_bins in (1, 7, 300):
        assert count_marks(moments, (0.0, times.last_s), num_bins).sum() == len(moments)


def test_wrong_tables_are_named() -> None:
    run = replay(conversations(10), "full-kv", limits=LIMITS)
    with pytest.raises(RecordingError, match=r"the events name \d+ block changes, the table 'blocks' has \d+"):
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
    """Its tables are written at different moments: what they agree on equals the whole run up to there."""
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
    assert (part.lives.state[lives_at(part, moments)] == whole.lives.state[lives_at(whole, moments)]).all()


def test_an_empty_run(one_run: Occupancy) -> None:
    empty = replace(one_run, num_blocks=3)
    run = replay(conversations(1), "full-kv", limits=LIMITS)
    manifest = manifest_of(run) | {"num_blocks": 3}
    empty = replay_blocks(run.blocks.slice(0, 0), run.events.slice(0, 0), run.steps.slice(0, 0), manifest)
    assert empty.span_s == (0.0, 0.0)
    assert empty.counts.tolist() == [[3, 0, 0, 0, 0, 0]]
