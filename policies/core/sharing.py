"""Prefix sharing: what of a request's table can be matched, by others or by itself."""

from policies.core.prefix import Content
from policies.core.request import Request
from policies.core.state import State

OWN = -1  # marks content that only its writer knows


def content(request: Request, index: int) -> Content:
    """What full block `index` of an uncompressed request holds: a shareable prompt block, or one of its own."""
    return request.content[index] if index < request.content.num_blocks else (OWN, request.number, index)


def match(state: State, request: Request) -> list[int]:
    """Blocks that hold the request's leading tokens already, all but its last token at most."""
    if state.index is None:
        return []
    usable = (request.total_tokens - 1) // state.limits.block_size
    return [entry.block for entry in state.index.match(content(request, index) for index in range(usable))]


def adopt(state: State, request: Request, blocks: list[int]) -> None:
    """The request becomes an owner of matched blocks, the head of its new table."""
    for block in blocks:
        state.pool.retain(block)
    request.table = list(blocks)
    request.num_registered = len(blocks)
    request.tail = state.pool.entries[blocks[-1]] if blocks else None


def register_prompt(state: State, request: Request, computed_tokens: int) -> None:
    """Make every full prompt block that has been computed matchable."""
    if state.index is None:
        return
    full = min(request.content.num_blocks, computed_tokens // state.limits.block_size)
    if request.num_registered < full:
        _register(state, request, full)
        state.admission_due = True


def register_own(state: State, request: Request, computed_tokens: int) -> None:
    """Before its blocks are given up to be recomputed: let the request find its own full blocks again.

    Nobody else can match them, so they are not worth an entry earlier.
    """
    if state.index is not None and not request.compressions:
        _register(state, request, computed_tokens // state.limits.block_size)


def forget_own(state: State, request: Request) -> None:
    """The request ends: blocks that only it could match are of no use any more."""
    if state.index is None:
        return
    for block in request.table[: request.num_registered]:
        entry = state.pool.entries[block]
        if entry is not None and entry.private:
            state.pool.forget(block)


def _register(state: State, request: Request, full: int) -> None:
    assert state.index is not None
    shareable = request.content.num_blocks
    for index in range(request.num_registered, full):
        block, known = request.table[index], content(request, index)
        request.tail = state.pool.register(state.index, request.tail, known, block, private=index >= shareable)
    request.num_registered = max(request.num_registered, full)
