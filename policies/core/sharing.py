"""Prefix sharing: what of a request's table can be matched, by others or by itself."""

from policies.core.prefix import OwnContent
from policies.core.request import Request
from policies.core.state import State


def match(state: State, request: Request) -> list[int]:
    """Blocks that hold the request's leading tokens already, all but its last token at most.

    First shareable prompt blocks, found by content; then, if all of those are there, blocks that only the request
    itself can match: what it gave up when it was preempted and nobody has reused yet.
    """
    if state.index is None:
        return []
    usable = (request.total_tokens - 1) // state.limits.block_size
    content, own = request.content, request.own
    shareable = min(content.num_blocks, usable)
    hits = [entry.block for entry in state.index.match(content[index] for index in range(shareable))]
    if own is not None and len(hits) == shareable:
        entries = state.pool.entries
        for block in own.table[shareable:usable]:
            if entries[block] is not own:
                break
            hits.append(block)
    return hits


def adopt(state: State, request: Request, blocks: list[int]) -> None:
    """The request becomes an owner of matched blocks, the head of its new table."""
    for block in blocks:
        state.pool.retain(block)
    request.table = list(blocks)
    request.num_registered = min(len(blocks), request.content.num_blocks)
    request.tail = state.pool.shareable_entry(blocks[request.num_registered - 1]) if request.num_registered else None


def register_prompt(state: State, request: Request, computed_tokens: int) -> None:
    """Make every full prompt block that has been computed matchable."""
    if state.index is None:
        return
    full = min(request.content.num_blocks, computed_tokens // state.limits.block_size)
    for index in range(request.num_registered, full):
        request.tail = state.pool.register(state.index, request.tail, request.content[index], request.table[index])
        state.admission_due = True
    request.num_registered = max(request.num_registered, full)


def keep_own(state: State, request: Request, computed_tokens: int) -> None:
    """Before its blocks are given up to be recomputed: mark its other full blocks, so that it can find them again."""
    if state.index is None or request.compressions:
        return
    if request.own is None:
        request.own = OwnContent()
    request.own.table = request.table
    entries, own = state.pool.entries, request.own
    for block in request.table[request.num_registered : computed_tokens // state.limits.block_size]:
        entries[block] = own


def forget_own(state: State, request: Request) -> None:
    """The request ends, or its blocks are about to be overwritten: what only it could match is of no use any more."""
    if request.own is not None:
        entries = state.pool.entries
        for block in request.table[request.num_registered :]:
            entries[block] = None
