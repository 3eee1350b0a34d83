import itertools

import numpy as np
import pytest

from policies.core.limits import Limits
from sim.replay import replay
from tests.traces.small_runs import BLOCK, LIMITS, POLICIES, conversations, watched
from traces.detail import lives_at
from traces.follow import blocks_of, fill_at, life_of
from traces.holding import holdings_of
from traces.occupancy import CACHED, FREE, OWNED, SHARED, replay_blocks
from traces.phases import phases_of
from traces.recording import Recording
from traces.story import Story, requests_by_number


@pytest.mark.parametrize(("policy", "limits"), [POLICIES[0], POLICIES[3], POLICIES[5], POLICIES[6]])
def test_the_blocks_of_a_request_are_its_table(policy: str, limits: Limits) -> None:
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
def test_fill_adds_up_to_the_tokens_that_are_stored(policy: str, limits: Limits) -> None:
    run = replay(conversations(), policy, limits=limits)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    holdings = holdings_of(run.events, run.steps, run.manifest)
    middle = (run.steps["start_s"].to_numpy() + run.steps["end_s"].to_numpy()) / 2
    steps = np.flatnonzero((run.steps["compressing"].to_numpy() == 0) & (run.steps["swaps"].to_numpy() == 0))[::11]
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


def test_the_story_says_what_the_tables_say(tmp_path: object) -> None:
    folder = f"{tmp_path}/run"
    run = replay(conversations(), f"{POLICIES[0][0]},num_slots=1", limits=LIMITS, out=folder)
    recording = Recording(folder)
    phases = phases_of(run.events, run.steps, run.manifest, run.requests)
    story = Story(recording, phases)
    rows = run.requests.to_pylist()
    told = {row["number"]: story.tell(row) for row in rows}
    for row in rows:
        words = [line.words for line in told[row["number"]]]
        assert sum(text.startswith("preempted") for text in words) == row["preemptions"]
        assert sum(text.startswith("goes on with") for text in words) == row["compressions"]
        assert words[0].startswith("arrived")
        assert words[-1].startswith(row["status"])
        moments = [line.time_s for line in told[row["number"]]]
        assert moments == sorted(moments)
    everything = "\n".join(line.words for lines in told.values() for line in lines)
    assert "for a query slot behind r" in everything
    assert "in line behind r" in everything
    assert "to make room for r" in everything


def test_rows_are_found_by_number() -> None:
    run = replay(conversations(20), "full-kv", limits=LIMITS)
    assert [row["number"] for row in requests_by_number(run.requests, [7, 99, 3])] == [7, 3]
