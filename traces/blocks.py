"""Ids of prompt blocks: chained ids made from content hashes or tokens, and blocks of one size seen in another.

A *chained* id names a block together with everything before it: two prompts with an equal id at block i are equal
through the end of block i. A *content* id names only the block's own tokens.
"""

from collections.abc import Iterable
from itertools import count

from traces.workload import TraceError, TraceRequest, WorkloadMeta


class BlockChains:
    """Gives each (parent block, content) its own chained id, numbered from 0 in order of first appearance."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def chain(self, contents: Iterable[object]) -> tuple[int, ...]:
        """The chained ids of a prompt whose blocks have these contents, first block first."""
        ids = self._ids
        parent = -1
        chained = []
        for content in contents:
            parent = ids.setdefault((parent, content), len(ids))
            chained.append(parent)
        return tuple(chained)

    def chain_tokens(self, token_ids: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """The chained ids of a prompt's tokens cut into blocks; the last may be partial."""
        return self.chain(token_ids[i : i + block_size] for i in range(0, len(token_ids), block_size))


class PromptBlocks:
    """The prompts of one workload in blocks of any size that divides, or is divided by, the workload's own.

    Ids are chained and comparable among the requests of this workload only. Between sizes nothing is guessed: in
    coarser blocks an id is that of the last finer block inside; in finer ones each id is split, so that prompts which
    part within a trace's block share none of it. Real token ids, where given, are used at any size.
    """

    def __init__(self, meta: WorkloadMeta, block_size: int) -> None:
        if block_size < 1:
            raise TraceError(f"block size is {block_size}, must be at least 1")
        self.block_size = block_size
        self.trace_block_size = meta.block_size
        self.names_last_block = meta.last_block != "full"
        self._chains = BlockChains()
        self._own = count()
        self._by_tokens: bool | None = None  # whether the ids come from tokens; the two kinds cannot be compared

    def full_blocks(self, request: TraceRequest) -> tuple[int, ...] | None:
        """One id per full block of the prompt, or None where it is unknown what the prompt shares."""
        num_full = request.prompt_tokens // self.block_size
        self._settle_kind(request)
        if request.prompt_ids is not None:
            return self._chains.chain_tokens(request.prompt_ids[: num_full * self.block_size], self.block_size)
        return None if request.prefix_ids is None else self._resized(request.prefix_ids, num_full)

    def all_blocks(self, request: TraceRequest) -> tuple[int, ...] | None:
        """As `full_blocks`, with an id for the started last block too.

        Where the trace does not name a started block, that block is the request's own: its id is new at every call.
        """
        num_full = request.prompt_tokens // self.block_size
        self._settle_kind(request)
        if request.prompt_ids is not None:
            return self._chains.chain_tokens(request.prompt_ids, self.block_size)
        if request.prefix_ids is None:
            return None
        num_all = -(-request.prompt_tokens // self.block_size)
        if self.names_last_block:
            return self._resized(request.prefix_ids, num_all)
        # Even ids are the trace's, odd ones the requests' own.
        named = self._resized(request.prefix_ids, num_full)
        own = tuple(2 * next(self._own) + 1 for _ in range(num_all - num_full))
        return tuple(2 * block for block in named) + own

    def _settle_kind(self, request: TraceRequest) -> None:
        by_tokens = request.prompt_ids is not None
        if not by_tokens and request.prefix_ids is None:
            return
        if self._by_tokens is None:
            self._by_tokens = by_tokens
        if by_tokens != self._by_tokens:
            raise TraceError(f"request {request.id!r}: some requests have prompt_ids, others only prefix_ids")

    def _resized(self, ids: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
        size, own_size = self.block_size, self.trace_block_size
        if own_size is None:
            raise TraceError("prefix ids without a block size: the workload's metadata lacks block_size")
        if size % own_size == 0:
            step = size // own_size
            resized = ids if step == 1 else ids[step - 1 :: step]
            # A started last block ends before its own last finer block: the prompt's last id names it.
            return resized[:num_blocks] if len(resized) >= num_blocks else (*resized, ids[-1])
        if own_size % size == 0:
            step = own_size // size
            split = [block * step + part for block in ids for part in range(step)]
            return tuple(split[:num_blocks])
        raise TraceError(f"blocks of {size} tokens cannot be made from a trace's blocks of {own_size}: neither divides")
