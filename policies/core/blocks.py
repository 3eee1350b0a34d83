"""The block pool: who holds which block, and which block is reused next."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

from policies.core.prefix import Content, OwnContent, PrefixEntry, PrefixIndex


class BlockState(IntEnum):
    """What a block is at one moment; codes are those of a recording."""

    FREE = 0  # no owner, content of no use
    OWNED = 1  # one owner
    SHARED = 2  # several owners, read only
    CACHED = 3  # no owner, content still matchable
    TARGET = 4  # a running compression writes to it
    HELD = 5  # given up, but an unfinished copy still reads it


class BlockPool:
    """Reference counts and reuse order of `num_blocks` blocks.

    Unowned blocks stand in one line, reused from its head: least recently used first. A block whose content is still
    matchable keeps it until it is reused. `num_free` counts every unowned block, `num_cached` those with content.
    """

    __slots__ = (
        "_line",
        "_stale",
        "entries",
        "held",
        "num_blocks",
        "num_cached",
        "num_free",
        "num_shared_extra",
        "refs",
        "targets",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_shared_extra = 0  # sum of (references - 1) over owned blocks
        self.refs = [0] * num_blocks
        self.entries: list[PrefixEntry | OwnContent | None] = [
            None
        ] * num_blocks  # what a block's content can be matched as
        self.targets: set[int] = set()
        self.held: set[int] = set()
        self._line: deque[int] = deque(range(num_blocks))
        self._stale: dict[int, int] = {}  # block -> places in the line that no longer count (it was matched meanwhile)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Give the next `count` reusable blocks to one owner each, in reuse order; their old content is forgotten.

        The caller has checked `num_free`.
        """
        line, refs = self._line, self.refs
        take_next = self._next if self._stale else line.popleft
        taken = [take_next() for _ in range(count)]
        self.num_free -= count
        for block in taken:
            refs[block] = 1
        if self.num_cached:
            entries = self.entries
            for block in taken:
                entry = entries[block]
                if entry is not None:
                    self.num_cached -= 1
                    entries[block] = None
                    if isinstance(entry, PrefixEntry):
                        entry.index.remove(entry)
        return taken

    def retain(self, block: int) -> None:
        """Add an owner to a block whose content was matched."""
        if self.refs[block]:
            self.num_shared_extra += 1
        else:
            self._stale[block] = self._stale.get(block, 0) + 1
            self.num_free -= 1
            self.num_cached -= 1
        self.refs[block] += 1

    def release(self, block: int) -> BlockState:
        """Take one owner away; returns what the block is now.

        An unowned block goes to the tail of the reuse line. Freeing a block that nobody owns is a bug of the caller.
        """
        refs = self.refs[block]
        assert refs > 0, f"block {block} has no owner and cannot be freed"
        self.refs[block] = refs - 1
        if refs > 1:
            self.num_shared_extra -= 1
            return BlockState.SHARED if refs > 2 else BlockState.OWNED
        self._line.append(block)
        self.num_free += 1
        if self.entries[block] is not None:
            self.num_cached += 1
            return BlockState.CACHED
        return BlockState.FREE

    def release_private(self, blocks: Sequence[int], matchable: bool = False) -> None:
        """Free blocks that one owner holds alone, in the order given: all with matchable content, or none."""
        refs = self.refs
        for block in blocks:
            assert refs[block] == 1, f"block {block} has {refs[block]} owners and cannot be freed as private"
            refs[block] = 0
        self._line.extend(blocks)
        self.num_free += len(blocks)
        if matchable:
            self.num_cached += len(blocks)

    def register(self, index: PrefixIndex, parent: PrefixEntry | None, content: Content, block: int) -> PrefixEntry:
        """Make an owned block's content matchable as `content` after `parent`; an older copy is no longer found."""
        entry, older = index.register(parent, content, block)
        if older is not None and older != block:
            self.entries[older] = None
            if not self.refs[older]:
                self.num_cached -= 1
        self.entries[block] = entry
        return entry

    def shareable_entry(self, block: int) -> PrefixEntry:
        """The index entry of a block that was just matched by content."""
        entry = self.entries[block]
        assert isinstance(entry, PrefixEntry)
        return entry

    def forget(self, block: int) -> None:
        """Make a block's content unmatchable: it is about to be overwritten. No effect on one without an entry."""
        entry = self.entries[block]
        if isinstance(entry, PrefixEntry):
            entry.index.remove(entry)
        self.entries[block] = None

    def forget_all(self) -> list[int]:
        """Make every block's content unmatchable; returns those without owner that were, in order of their numbers."""
        cached = [block for block in range(self.num_blocks) if self.entries[block] is not None and not self.refs[block]]
        for block in range(self.num_blocks):
            self.forget(block)
        self.num_cached = 0
        return cached

    def state(self, block: int) -> BlockState:
        """What the block is now."""
        if block in self.held:
            return BlockState.HELD
        if block in self.targets:
            return BlockState.TARGET
        if self.refs[block]:
            return BlockState.SHARED if self.refs[block] > 1 else BlockState.OWNED
        return BlockState.FREE if self.entries[block] is None else BlockState.CACHED

    def shared(self, blocks: Iterable[int]) -> int:
        """How many leading blocks of a table reach to the last one that has another owner too.

        In between there may be blocks of one owner: where two requests computed the same prefix at the same time, who
        comes next shares with each of them what it registered last.
        """
        return max((place for place, block in enumerate(blocks, 1) if self.refs[block] > 1), default=0)

    def _next(self) -> int:
        """The head of the reuse line, places that no longer count left out."""
        block = self._line.popleft()
        while block in self._stale:
            left = self._stale[block] - 1
            if left:
                self._stale[block] = left
            else:
                del self._stale[block]
            block = self._line.popleft()
        return block
