"""Statistics of a workload, prefix reuse, and the distance between two workloads.

Percentiles interpolate linearly between the two nearest ranks (numpy's default, type 7 of Hyndman
and Fan 1996). The published figures of the Azure traces use the same definition, rounded.

`prefix_reuse` counts the prompt blocks that an infinite prefix cache would hold, and
`lru_hit_shares` those that a least-recently-used cache would hold. A block counts as reused only if
all blocks before it in its prompt are reused, too (a *leading* block).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # scipy loads a submodule such as scipy.special at its first use

from zlab.traces.block_ids import PromptBlocks
from zlab.traces.workload import CHUNK_ROWS, TraceError, Workload, request_columns

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Count, mean, percentiles and extremes of a field, over the requests that have it."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: "np.ndarray[Any, np.dtype[Any]]") -> "Distribution | None":
        """Return the distribution of the values, None if there are none."""
        if not len(values):
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
        return cls(
            len(values),
            float(values.mean()),
            p50,
            p90,
            p99,
            float(values.min()),
            float(values.max()),
        )


@dataclass(frozen=True)
class WorkloadStatistics:
    """Lengths and times of a workload. Times are None for an offline batch, lengths None where they
    are unknown.
    """

    num_requests: int
    span_s: float | None  # from the first arrival to the last
    rate_per_s: float | None  # number of requests after the first / span
    longest_gap_s: float | None
    # coefficient of variation of the gaps: 1 for Poisson arrivals, larger for bursts
    gap_cv: float | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    total_prompt_tokens: int
    total_output_tokens: int
    num_sessions: int
    classes: dict[str, int]
    models: dict[str, int]


def describe(workload: Workload) -> WorkloadStatistics:
    """Return the statistics of the workload."""
    numbers: dict[str, list[Any]] = {"arrival_s": [], "prompt_tokens": [], "output_tokens": []}
    names: dict[str, Counter[str]] = {"session": Counter(), "cls": Counter(), "model": Counter()}
    for start in range(0, len(workload), CHUNK_ROWS):
        for name, cells in request_columns(
            workload.requests, start, min(start + CHUNK_ROWS, len(workload)), _USED
        ):
            if name in numbers:
                numbers[name].append(
                    np.asarray([cell for cell in cells if cell is not None], dtype=np.float64)
                )
            else:
                names[name].update(cell for cell in cells if cell is not None)
    times, prompts, outputs = (np.concatenate(parts or [np.zeros(0)]) for parts in numbers.values())
    gaps = np.diff(times)
    span = float(times[-1] - times[0]) if len(times) else None
    return WorkloadStatistics(
        num_requests=len(workload),
        span_s=span,
        rate_per_s=len(gaps) / span if span else None,
        longest_gap_s=float(gaps.max()) if len(gaps) else None,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        prompt_tokens=Distribution.of(prompts),
        output_tokens=Distribution.of(outputs),
        total_prompt_tokens=int(prompts.sum()),
        total_output_tokens=int(outputs.sum()),
        num_sessions=len(names["session"]),
        classes=dict(sorted(names["cls"].items())),
        models=dict(sorted(names["model"].items())),
    )


_USED = ("arrival_s", "prompt_tokens", "output_tokens", "session", "cls", "model")


DENSE_IDS = 2**28
"""Ids below this are remembered in one byte each (a trace numbers its blocks from 0); others in a
set.
"""


@dataclass(frozen=True)
class PrefixReuse:
    """Leading blocks found in an infinite prefix cache. Requests are left out if it is unknown what
    they share.
    """

    block_size: int
    num_requests: int
    num_blocks: int
    num_reused_blocks: int
    num_wholly_cached: int  # requests with at least one block whose blocks were all cached

    @property
    def share(self) -> float:
        """Reused blocks / all blocks, 0 without blocks."""
        return self.num_reused_blocks / self.num_blocks if self.num_blocks else 0.0


def prompts_in_blocks(
    workload: Workload, block_size: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield each prompt's block ids in order of arrival, at the trace's own block size unless
    another is given.

    Partial last blocks are included where the trace names them or has the tokens. Requests are left
    out if it is unknown what they share.
    """
    size = block_size or workload.meta.block_size
    if size is None:
        raise TraceError(f"workload {workload.meta.name!r} has no block size of its own: name one")
    blocks = PromptBlocks(workload.meta, size)
    for request in workload:
        ids = blocks.all_blocks(request) if blocks.names_last_block else blocks.full_blocks(request)
        if ids is not None:
            yield ids


class _SeenIds:
    def __init__(self) -> None:
        self._dense = bytearray()
        self._sparse: set[int] = set()

    def add(self, ids: tuple[int, ...]) -> int:
        """Return how many leading ids were known. All ids are known afterwards."""
        highest = max(ids, default=-1)
        seen = self._dense
        if highest >= DENSE_IDS:
            leading = _leading(ids, self._sparse, seen)
            self._sparse.update(ids)
            return leading
        if highest >= len(seen):
            seen.extend(bytes(max(highest + 1 - len(seen), len(seen))))
        leading = 0
        for block in ids:
            if not seen[block] and block not in self._sparse:
                break
            leading += 1
        for block in ids[leading:]:
            seen[block] = 1
        return leading


def _leading(ids: tuple[int, ...], sparse: set[int], dense: bytearray) -> int:
    for index, block in enumerate(ids):
        if block not in sparse and not (block < len(dense) and dense[block]):
            return index
    return len(ids)


def prefix_reuse(workload: Workload, block_size: int | None = None) -> PrefixReuse:
    """Count the reuse of leading blocks with an infinite cache."""
    seen = _SeenIds()
    num_requests = num_blocks = num_reused = num_whole = 0
    for ids in prompts_in_blocks(workload, block_size):
        leading = seen.add(ids)
        num_requests += 1
        num_blocks += len(ids)
        num_reused += leading
        num_whole += 0 < len(ids) == leading
    size = block_size or workload.meta.block_size
    assert size is not None  # prompts_in_blocks has raised otherwise
    return PrefixReuse(size, num_requests, num_blocks, num_reused, num_whole)


def lru_hit_shares(
    workload: Workload, capacities: Sequence[int], block_size: int | None = None
) -> dict[int, float]:
    """Return the share of prompt blocks that an LRU prefix cache would hold, for each capacity.

    For each request, the leading blocks are looked up. Then its blocks are touched or inserted from
    last to first, so that the first block is the most recently used. Then the oldest blocks are
    evicted down to the capacity.

    Args:
        workload: The requests.
        capacities: Cache sizes in blocks.
        block_size: Tokens of a block; by default that of the workload.
    """
    for capacity in capacities:
        if capacity < 1:
            raise TraceError(f"cache capacity is {capacity}, must be at least 1 block")
    caches = {capacity: OrderedDict[int, None]() for capacity in capacities}
    hits = dict.fromkeys(capacities, 0)
    num_blocks = 0
    for ids in prompts_in_blocks(workload, block_size):
        num_blocks += len(ids)
        for capacity, cache in caches.items():
            hits[capacity] += next(
                (i for i, block in enumerate(ids) if block not in cache), len(ids)
            )
            for block in reversed(ids):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return {capacity: found / num_blocks if num_blocks else 0.0 for capacity, found in hits.items()}


FloatArray = npt.NDArray[np.float64]
NEARLY_ALIKE, ANOTHER = (
    0.1,
    0.25,
)  # distances below the first are "alike", from the second on the distributions are different
SURE = 0.01  # a distance that chance gives more often than this is not significant
ALIKE_RATIO = 1.1


@dataclass(frozen=True)
class Distance:
    """The Kolmogorov-Smirnov distance: the largest difference of two distribution functions, in [0,
    1].

    `chance` is the probability that two samples of these sizes from one distribution have at least
    this distance.
    """

    value: float
    chance: float

    @property
    def is_alike(self) -> bool:
        """Whether the distance is too small to matter or not significant."""
        return self.value < NEARLY_ALIKE or self.chance > SURE


def ks_distance(one: FloatArray, other: FloatArray) -> Distance:
    """Return the two-sample distance and its probability under one distribution, with the
    correction of Stephens (1970).

    Ties make the true probability smaller. Raise TraceError on an empty sample.
    """
    if not len(one) or not len(other):
        raise TraceError("a distance needs values on both sides")
    values = np.concatenate([one, other])
    shares = [
        np.searchsorted(np.sort(side), values, side="right") / len(side) for side in (one, other)
    ]
    distance = float(np.abs(shares[0] - shares[1]).max())
    effective = (len(one) * len(other) / (len(one) + len(other))) ** 0.5
    # Not ks_2samp: its asymptotic form divides by zero for two samples of one value.
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    return Distance(distance, float(scipy.special.kolmogorov(scaled)))


@dataclass(frozen=True)
class LoadDifference:
    """One property of two loads: its typical value in each, the distance, and a sentence about it.

    `distance` is None where each side is a single number; `is_alike` then depends on their ratio.
    """

    name: str
    before: float | None
    now: float | None
    distance: Distance | None
    is_alike: bool
    words: str


def compare_loads(before: Workload, now: Workload) -> list[LoadDifference]:
    """Compare every property that both loads have: lengths, gaps between arrivals, rate, and share
    of repeated prompt blocks.
    """
    found = [
        _lengths(
            "prompt tokens",
            [row.prompt_tokens for row in before],
            [row.prompt_tokens for row in now],
        ),
        _lengths(
            "output tokens",
            [row.output_tokens for row in before],
            [row.output_tokens for row in now],
        ),
    ]
    gaps = [_gaps(workload) for workload in (before, now)]
    if all(map(len, gaps)):
        found.append(
            _distribution("gap between arrivals, s", gaps[0], gaps[1], ("wider", "narrower"), 3)
        )
        rates = [1.0 / float(each.mean()) if each.mean() > 0 else None for each in gaps]
        found.append(_single("arrivals a second", rates[0], rates[1], ("faster", "slower")))
    reuse = _reuse(before, now)
    if reuse is not None:
        found.append(_share("prompt blocks that repeat", *reuse))
    return found


def _lengths(name: str, before: list[int | None], now: list[int | None]) -> LoadDifference:
    sides = [
        np.array([value for value in side if value is not None], dtype=np.float64)
        for side in (before, now)
    ]
    return _distribution(name, sides[0], sides[1], ("longer", "shorter"), 0)


def _gaps(workload: Workload) -> FloatArray:
    times = [row.arrival_s for row in workload if row.arrival_s is not None]
    return np.diff(np.sort(np.array(times, dtype=np.float64)))


def _distribution(
    name: str, before: FloatArray, now: FloatArray, directions: tuple[str, str], digits: int
) -> LoadDifference:
    medians = [float(np.median(side)) if len(side) else None for side in (before, now)]
    if not len(before) or not len(now):
        return LoadDifference(
            name, medians[0], medians[1], None, True, f"{name}: not known on both sides"
        )
    distance = ks_distance(before, now)
    shown = f"distance {distance.value:.2f}"
    if distance.is_alike:
        return LoadDifference(
            name, medians[0], medians[1], distance, True, f"{name}: alike ({shown})"
        )
    middle = [float(np.median(side)) for side in (before, now)]
    if middle[0] == middle[1]:
        middle = [float(side.mean()) for side in (before, now)]
    direction = directions[0] if middle[1] > middle[0] else directions[1]
    how = "another distribution, " if distance.value >= ANOTHER else ""
    words = (
        f"{name}: {how}{direction}, half above {middle[1]:,.{digits}f} instead of "
        f"{middle[0]:,.{digits}f} ({shown})"
    )
    return LoadDifference(name, medians[0], medians[1], distance, False, words)


def _single(
    name: str, before: float | None, now: float | None, directions: tuple[str, str]
) -> LoadDifference:
    if not before or not now:
        return LoadDifference(name, before, now, None, True, f"{name}: not known on both sides")
    ratio = now / before
    if 1.0 / ALIKE_RATIO <= ratio <= ALIKE_RATIO:
        return LoadDifference(
            name, before, now, None, True, f"{name}: alike ({now:,.3g} and {before:,.3g})"
        )
    direction = directions[0] if ratio > 1.0 else directions[1]
    return LoadDifference(
        name,
        before,
        now,
        None,
        False,
        f"{name}: {direction}, {now:,.3g} instead of {before:,.3g} ({ratio:.2f} times)",
    )


def _share(name: str, before: float, now: float) -> LoadDifference:
    alike = abs(now - before) < NEARLY_ALIKE
    words = f"alike ({now:.0%} and {before:.0%})" if alike else f"{now:.0%} instead of {before:.0%}"
    return LoadDifference(name, before, now, None, alike, f"{name}: {words}")


def _reuse(before: Workload, now: Workload) -> tuple[float, float] | None:
    """Return the share of repeated leading blocks of each workload, in blocks of a size that suits
    both; None if it is unknown.
    """
    sizes = [workload.meta.block_size for workload in (before, now)]
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    try:
        found = [prefix_reuse(workload, max(known)) for workload in (before, now)]
    except TraceError:
        return None  # neither block size divides the other
    if not all(each.num_requests for each in found):
        return None
    return found[0].share, found[1].share
