"""The runs that `benchmarks.validate_simulator` can make: what is played, under which policy, in how large a pool."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from benchmarks.engine_gpu import shared
from benchmarks.run_figures import plain
from traces.formats import read_trace
from traces.reshape import cut, faster, longer
from traces.workload import TraceRequest, Workload, WorkloadMeta

CALIBRATE = "calibrate"  # no run, but chosen as one
PARTS = (CALIBRATE, "closed", "timed", "grid")  # where nothing is said
ALL_PARTS = (*PARTS, "more")
CLOSED = ("W1", "W2", "W4")
POLICIES = ("full-kv", "hybrid", "hybrid:join=blocking")
SWAP = "hybrid:comes_back=swap"
SLICE_S = 600.0


@dataclass(frozen=True)
class Size:
    """How large everything is; the defaults are for Qwen3-8B on one H200."""

    block_size: int = 256
    pool_blocks: int = 512
    host_blocks: int = 256  # of the runs that swap
    max_running: int = 256
    max_batched_tokens: int = 16384
    first: int | None = None  # only so many requests of each workload
    small_budget: int = 1024
    grid_requests: int = 64
    grid_pools: tuple[int, ...] = (48, 72, 112)
    grid_budgets: tuple[int, ...] = (256, 512)


@dataclass(frozen=True)
class Point:
    """One run to make."""

    name: str
    workload: Callable[[], Workload]
    policy: str
    pool_blocks: int
    at_once: bool
    weight: float = 1.0
    host_blocks: int = 0


def small(workload: Workload, size: Size) -> Workload:
    """For machines without a GPU: outputs in proportion to the blocks, and only the first requests."""
    if size.block_size < 256 and all(request.output_ids is None for request in workload):
        workload = longer(workload, output=size.block_size / 256)
    return cut(workload, first=size.first) if size.first is not None else workload


def grid_workload(size: Size) -> Workload:
    """Requests whose outputs are lognormal around 2.5 blocks, all at once: enough to want two pools.

    With these pools and budgets a simulation has no two points of the grid nearer to each other than 3 % of tokens/s:
    their order is no matter of chance, and the engine needs little over two minutes for all.
    """
    generator = np.random.default_rng(6)
    outputs = generator.lognormal(np.log(2.5 * size.block_size), 0.4, size.grid_requests)
    requests = [
        TraceRequest(
            id=str(place),
            prompt_tokens=size.block_size // 2,
            output_tokens=max(int(tokens), 2),
            max_tokens=max(int(tokens), 2),
        )
        for place, tokens in enumerate(outputs)
    ]
    return Workload(requests, WorkloadMeta(name="grid", source="benchmarks.validate_simulator, seed 6"))


def points(parts: Sequence[str], size: Size) -> Iterator[Point]:
    """Every run of the parts, the most wanted first."""
    if "closed" in parts:
        for name in CLOSED:
            for policy in POLICIES:
                yield _closed(name, policy, size)
    if "more" in parts:
        for name in CLOSED:
            yield _closed(name, f"hybrid:budget.tokens={size.small_budget}", size)
            yield _closed(name, SWAP, size, size.host_blocks)
    if "timed" in parts:
        for name, file, speed in (
            ("azure", "AzureLLMInferenceTrace_conv.csv", 1.0),
            ("mooncake", "mooncake_conversation_trace.jsonl", 0.25),  # as it is, one card cannot keep up with it
        ):
            for policy in POLICIES:
                yield _timed(name, file, speed, policy, size)
    if "grid" in parts:
        policies = ["full-kv", f"constrained:budget.tokens={size.grid_budgets[0]}"]
        policies += [f"hybrid:budget.tokens={budget}" for budget in size.grid_budgets]
        for pool in size.grid_pools:
            for policy in policies:
                yield Point(f"grid-{pool}-{plain(policy)}", lambda: grid_workload(size), policy, pool, True)
        again = (lambda: grid_workload(size), policies[0], size.grid_pools[0], True)
        yield Point(f"repeat-{size.grid_pools[0]}-{plain(policies[0])}", *again)


def _closed(name: str, policy: str, size: Size, host_blocks: int = 0) -> Point:
    def workload() -> Workload:
        return small(read_trace(shared("workloads", f"{name}.jsonl")), size)

    return Point(f"{name}-{plain(policy)}", workload, policy, size.pool_blocks, True, 2.0, host_blocks)


def _timed(name: str, file: str, speed: float, policy: str, size: Size) -> Point:
    def workload() -> Workload:
        slice_ = cut(read_trace(shared("traces", file)), 0.0, SLICE_S * speed)
        return small(slice_ if speed == 1.0 else faster(slice_, speed), size)

    return Point(f"{name}-{plain(policy)}", workload, policy, size.pool_blocks, False, 2.0)


def choose(names: Sequence[str], only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """The names that `only` lists (all without it), in that order, but those that `skip` lists.

    Both hold names or patterns, as "W4-*". Raises ValueError for one that no name answers to, or if nothing is left.
    """
    for pattern in (*only, *skip):
        matches(pattern, names)
    kept = [name for pattern in only or ("*",) for name in names if fnmatchcase(name, pattern)]
    left = [name for name in dict.fromkeys(kept) if not any(fnmatchcase(name, pattern) for pattern in skip)]
    if not left:
        raise ValueError("what is to be run is also skipped: nothing is left")
    return left


def read_shares(written: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Seconds by name from items as "W4-full-kv=500", patterns allowed. Raises ValueError."""
    found: dict[str, float] = {}
    for item in written:
        pattern, equals, seconds = item.partition("=")
        try:
            value = float(seconds)
        except ValueError:
            value = 0.0
        if not equals or not value > 0.0:
            raise ValueError(f"{item!r}: a share is NAME=SECONDS, as W4-full-kv=500")
        found |= dict.fromkeys(matches(pattern, names), value)
    return found


def matches(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern fits. Raises ValueError with the choices where it fits none."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"{pattern!r} is no run; there are {', '.join(names)}")
    return found


def share_of(left_s: float, wanted: Sequence[Point], pinned: Mapping[str, float]) -> float:
    """Seconds for the first of the runs that are still wanted, of so many that are left for all of them.

    It gets what it was promised; the others share what was promised to nobody by their weights.
    """
    first = wanted[0]
    if first.name in pinned:
        return min(pinned[first.name], left_s)
    free_s = left_s - sum(pinned.get(point.name, 0.0) for point in wanted)
    return free_s * first.weight / sum(point.weight for point in wanted if point.name not in pinned)
