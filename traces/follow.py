"""One block's life, and the blocks one request held: what a reader follows through an occupancy."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.holding import Holdings
from traces.moments import FloatArray
from traces.occupancy import CACHED, FREE, OWNED, SHARED, STATES, Int32Array, Occupancy


@dataclass(frozen=True)
class Stretch:
    """A block in one state for a while; `owner` is the one request that holds it, `actor` the one that made it so."""

    start_s: float
    end_s: float
    state: str
    refs: int
    owner: int | None
    actor: int | None


@dataclass(frozen=True)
class Held:
    """Stretches in which one request held blocks (alone or with others): `block[i]`, `start_s[i]` to `end_s[i]`."""

    block: Int32Array
    start_s: FloatArray
    end_s: FloatArray


def life_of(occupancy: Occupancy, block: int) -> list[Stretch]:
    """What a block was from the start of the run to its end. Raises IndexError for a block that the pool lacks."""
    if not 0 <= block < occupancy.num_blocks:
        raise IndexError(f"block {block} is not in 0..{occupancy.num_blocks - 1}")
    lives = occupancy.lives
    low, high = np.searchsorted(lives.block, (block, block + 1))
    return [
        Stretch(
            float(lives.start_s[i]),
            float(lives.end_s[i]),
            STATES[lives.state[i]],
            int(lives.refs[i]),
            _number(lives.owner[i]),
            _number(lives.actor[i]),
        )
        for i in range(low, high)
        if lives.end_s[i] > lives.start_s[i]
    ]


def _number(request: np.int32) -> int | None:
    return int(request) if request >= 0 else None


def blocks_of(occupancy: Occupancy, request: int) -> Held:
    """Every stretch in which the request held a block, shared ones included, by block and then time."""
    lives = occupancy.lives
    rows = np.flatnonzero(lives.actor == request)
    gone = (lives.state[rows] == FREE) | (lives.state[rows] == CACHED)
    before = np.maximum(rows - 1, 0)
    gone |= (lives.block[before] == lives.block[rows]) & (lives.refs[rows] < lives.refs[before])
    block, moment = lives.block[rows], lives.start_s[rows]
    # a block taken stays the request's until its next own row that gives it up; rows in between change nothing
    begins = ~gone
    begins[1:] &= gone[:-1] | (block[1:] != block[:-1])
    index = np.arange(len(rows))
    next_gone = np.full(len(rows) + 1, len(rows))
    next_gone[:-1] = np.where(gone, index, len(rows))
    next_gone = np.minimum.accumulate(next_gone[::-1])[::-1]
    start = np.flatnonzero(begins)
    stop = next_gone[start]
    known = np.minimum(stop, max(len(rows) - 1, 0))
    ends = (
        np.where((stop < len(rows)) & (block[known] == block[start]), moment[known], occupancy.times.last_s)
        if len(rows)
        else np.zeros(0)
    )
    keep = ends > moment[start]
    return Held(block[start][keep], moment[start][keep], ends[keep])


def fill_at(
    occupancy: Occupancy, holdings: Holdings, moments_s: FloatArray, index: npt.NDArray[np.intp]
) -> npt.NDArray[np.int32]:
    """Tokens in each block at each moment, [block, moment]: 0 if free, -1 where a copy makes it unknowable.

    A request's tokens fill its table from the front: shared blocks and cached ones are full, then its own in the order
    in which it got them. `index` is `lives_at` of the moments.
    """
    size = occupancy.block_size
    lives = occupancy.lives
    state, owner, row = lives.state[index], lives.owner[index], lives.row[index]
    fill = np.where((state == SHARED) | (state == CACHED), size, np.where(state == FREE, 0, -1)).astype(np.int32)
    everyone = np.unique(owner[state == OWNED])
    steps = np.array([occupancy.times.step_at(float(moment)) for moment in moments_s], dtype=np.int64)
    all_tokens, all_blocks = holdings.tokens_at(everyone, steps), holdings.blocks_at(everyone, steps)
    for column in range(len(moments_s)):
        own = np.flatnonzero(state[:, column] == OWNED)
        order = own[np.lexsort((row[own, column], owner[own, column]))]
        numbers, first, count = np.unique(owner[order, column], return_index=True, return_counts=True)
        place_of = np.searchsorted(everyone, numbers)
        tokens, ahead = all_tokens[place_of, column], all_blocks[place_of, column] - count  # shared blocks in front
        place = np.arange(len(order)) - np.repeat(first, count) + np.repeat(ahead, count)
        fill[order, column] = np.clip(np.repeat(tokens, count) - place * size, 0, size)
    return fill
