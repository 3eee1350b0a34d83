"""Random runs at random moments: every figure says what the table of blocks says."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly")

from zlab.dashboard.figures.activity import top_holders
from zlab.dashboard.figures.occupancy import Shown, hover_grid, state_layers
from zlab.dashboard.views.navigation import MIN_SPAN
from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.replay import Run, replay
from zlab.traces.occupancy import STATES, counts_at, mean_counts, replay_blocks
from zlab.traces.palette import BLOCK_LOOKS
from zlab.traces.schema import BlockEffect, BlockState, EventKind
from zlab.traces.synthetic import fixed
from zlab.traces.timeline import Names, event_times, holdings_of, step_times

POLICIES = (
    "constrained:tokens=48,window=8",
    "hybrid:tokens=64,window=8,num_slots=3",
    "full-kv",
    "full-kv:prefix=none",
)


class Table:
    """The table of blocks read row by row, up to a moment."""

    def __init__(self, run: Run) -> None:
        names = Names(run.manifest)
        self._num_blocks = int(run.manifest["num_blocks"])
        at = event_times(run.events, step_times(run.steps), names)
        self._at = np.repeat(at, run.events["num_blocks"].to_numpy())
        self._rows = list(
            zip(
                names.kinds(run.blocks).tolist(),
                run.blocks["block"].to_pylist(),
                run.blocks["request"].to_pylist(),
                strict=True,
            )
        )

    def at(self, moment_s: float) -> tuple[Counter[str], Counter[int]]:
        """Blocks in each state, and blocks that each request owns alone."""
        owners: list[set[int]] = [set() for _ in range(self._num_blocks)]
        state = [BlockState.FREE] * self._num_blocks
        for kind, block, request in self._rows[: np.searchsorted(self._at, moment_s, "right")]:
            effect = EventKind(kind).effect
            match effect.blocks:
                case BlockEffect.TAKE | BlockEffect.RESERVE | BlockEffect.REPLACE:
                    owners[block] = {request}
                case BlockEffect.SHARE:
                    owners[block].add(request)
                case BlockEffect.GIVE_BACK | BlockEffect.COPY:
                    owners[block].discard(request)
                case BlockEffect.FORGET:
                    owners[block].clear()
            assert effect.state is not None
            state[block] = effect.state
            if effect.state in (BlockState.SHARED, BlockState.OWNED):
                several = len(owners[block]) > 1
                state[block] = BlockState.SHARED if several else BlockState.OWNED
        alone = Counter(next(iter(found)) for found in owners if len(found) == 1)
        return Counter(one.label for one in state), alone


def made_up(seed: int, rate: float, policy: str) -> Run:
    """A short run; at low rates it has gaps without any step."""
    limits = SchedulerLimits(24, 16, 256, 8, 1024)
    return replay(fixed(14, 40, 60, rate, seed), policy, "l40s", "smollm2-135m", limits)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from((2.0, 4.0, 200.0)),
    st.sampled_from(POLICIES),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_figures_equal_the_table_of_blocks(
    seed: int, rate: float, policy: str, places: list[float]
) -> None:
    run = made_up(seed, rate, policy)
    table = Table(run)
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    holdings = holdings_of(run.events, run.steps, run.manifest)
    moments = np.sort(np.array(places)) * occupancy.times.last_s
    numbers, owned = top_holders(occupancy, moments)
    counts = counts_at(occupancy, moments)
    held = holdings.blocks_at(numbers, occupancy.times.ticks_at(moments))
    no_copies = counts[:, BlockState.COMPACTION_TARGET] + counts[:, BlockState.SHARED] == 0
    for column, moment in enumerate(moments):
        states, alone = table.at(float(moment))
        assert {name: n for name, n in zip(STATES, counts[column], strict=True) if n} == states
        drawn = {int(r): int(n) for r, n in zip(numbers, owned[:, column], strict=True) if n}
        assert drawn == alone
        if no_copies[column]:
            assert (held[:, column] == owned[:, column]).all()
    _check_means(occupancy, moments)
    _check_hover(occupancy, holdings, table)


def _check_means(occupancy: Any, moments: Any) -> None:
    """The stacked areas of any window are the pool, and their mean is the true one."""
    window = float(moments[0]), float(moments[-1])
    if window[1] - window[0] < MIN_SPAN:
        return
    layers = {layer.name: np.array(layer.y) for layer in state_layers(occupancy, window, 17)}
    assert np.abs(sum(layers.values()) - occupancy.num_blocks).max() < 1e-3
    whole = mean_counts(occupancy, window, 1)[1][0]
    for name, mean in zip(STATES, whole, strict=True):
        assert layers[BLOCK_LOOKS[name].words][:-1].mean() == pytest.approx(mean, abs=1e-3)


def _check_hover(occupancy: Any, holdings: Any, table: Table) -> None:
    """The words at the pointer count the blocks of a row at that moment."""
    shown = Shown(occupancy.span_s, (0, occupancy.num_blocks))
    grid = hover_grid(occupancy, holdings, shown)
    for column in range(0, len(grid.moments_s), 7):
        states, alone = table.at(float(grid.moments_s[column]))
        for name, count in states.items():
            said = BLOCK_LOOKS[name].words
            assert sum(line[column].split("<br>")[0].endswith(said) for line in grid.words) == count
        clicked = Counter(number for number in grid.holder[:, column].tolist() if number >= 0)
        assert clicked == alone


def test_nobody_holds_a_block_while_all_are_free() -> None:
    """The next request has not arrived, and no step runs."""
    run = made_up(0, 4.0, POLICIES[0])
    occupancy = replay_blocks(run.blocks, run.events, run.steps, run.manifest)
    holdings = holdings_of(run.events, run.steps, run.manifest)
    start, end = run.steps["start_s"].to_numpy(), run.steps["end_s"].to_numpy()
    gap = int(np.argmax(start[1:] - end[:-1]))
    assert start[gap + 1] - end[gap] > 0.05
    moment = np.array([(start[gap + 1] + end[gap]) / 2])
    assert counts_at(occupancy, moment)[0, BlockState.FREE] == 24
    assert top_holders(occupancy, moment)[1].sum() == 0
    held = holdings.blocks_at(holdings.numbers(), occupancy.times.ticks_at(moment))
    assert held.sum() == 0
