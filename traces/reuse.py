"""How much of the prompts a prefix cache could have held: with room for everything, and least recently used.

A block counts as reused while every block before it in its prompt is reused too (a *leading* block).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from traces.blocks import PromptBlocks
from traces.workload import TraceError, Workload

DENSE_IDS = 2**28
"""Ids below this are remembered in one byte each (a trace numbers its blocks from 0); others in a set."""


@dataclass(frozen=True)
class PrefixReuse:
    """Leading blocks found in a cache that forgets nothing; requests whose sharing is unknown are left out."""

    block_size: int
    num_requests: int
    num_blocks: int
    num_reused_blocks: int
    num_wholly_cached: int  # requests all of whose blocks, at least one, were there

    @property
    def share(self) -> float:
        """Reused blocks by all blocks, 0 for no block."""
        return self.num_reused_blocks / self.num_blocks if self.num_blocks else 0.0


def prompts_in_blocks(workload: Workload, block_size: int | None = None) -> Iterator[tuple[int, ...]]:
    """Each prompt's block ids in order of arrival, at the trace's own block size unless another is given.

    Started last blocks are included where the trace names them or has the tokens. Requests of unknown sharing are
    left out.
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

    def take_in(self, ids: tuple[int, ...]) -> int:
        """How many leading ids were known; all are known afterwards."""
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
    """Leading-block reuse with an infinite cache."""
    seen = _SeenIds()
    num_requests = num_blocks = num_reused = num_whole = 0
    for ids in prompts_in_blocks(workload, block_size):
        leading = seen.take_in(ids)
        num_requests += 1
        num_blocks += len(ids)
        num_reused += leading
        num_whole += 0 < len(ids) == leading
    size = block_size or workload.meta.block_size
    assert size is not None  # prompts_in_blocks has refused it
    return PrefixReuse(size, num_requests, num_blocks, num_reused, num_whole)


def lru_hit_shares(workload: Workload, capacities: Sequence[int], block_size: int | None = None) -> dict[int, float]:
    """For each capacity in blocks: leading blocks found by all blocks, with the least recently used given up.

    Per request: look up the leading blocks; then touch or insert its blocks from tail to head, so that the root ends
    as the most recent; then give up the oldest down to the capacity.
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
            hits[capacity] += next((i for i, block in enumerate(ids) if block not in cache), len(ids))
            for block in reversed(ids):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return {capacity: found / num_blocks if num_blocks else 0.0 for capacity, found in hits.items()}
