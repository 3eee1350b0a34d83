"""Ids of prompt blocks: chained ids made from content hashes or tokens, and blocks of one size seen in another.

A *chained* id names a block together with everything before it: two prompts with an equal id at block i are equal
through the end of block i. A *content* id names only the block's own tokens.
"""

from collections.abc import Iterable


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
