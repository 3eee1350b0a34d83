"""The block pool and the prefix index.

`BlockPool` counts the owners of each block and decides which block is reused next. `PrefixIndex`
finds the block that already holds the keys and values of given tokens after given tokens.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from zlab.traces.schema import BlockState

Content = Hashable  # the content of one full block: its token ids, or an id that represents them
BlockHash = Callable[[int, Content, int], int]


def chained_hash(parent: int, content: Content, salt: int) -> int:
    """Return the hash of a block's content after everything before it. Tuples of integers hash the
    same on every machine.
    """
    return hash((parent, content, salt))


class PrefixEntry:
    """A block that any request can match: its content, the entry before it, and its number.

    Attributes:
        block: The block that a match finds.
        copies: Further blocks with the same content, in order of registration; None without any.
            When `block` is reused, the first of them takes its place.
    """

    __slots__ = ("block", "content", "copies", "hash", "index", "parent")

    def __init__(
        self,
        index: "PrefixIndex",
        parent: "PrefixEntry | None",
        content: Content,
        hash_: int,
        block: int,
    ) -> None:
        self.index = index
        self.parent = parent
        self.content = content
        self.hash = hash_
        self.block = block
        self.copies: list[int] | None = None

    def names(self, block: int) -> bool:
        """Return whether the block is one of those with this content."""
        return self.block == block or (self.copies is not None and block in self.copies)


class PrivatePrefix:
    """Marks blocks whose content only the request that wrote them can match again; they need no
    hash.

    Attributes:
        table: The request's block table when it released the blocks. A block of the table still
            counts while it carries this mark.
    """

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: list[int] = []


class PrefixIndex:
    """Finds full blocks by chained hash.

    Of equal content the newest copy is found, and the older ones are forgotten. With `keeps_copies`
    all copies stay, and the one that was registered first is found.

    A match compares content and history, so a hash collision costs time and never serves wrong keys
    and values. An entry lives exactly as long as the content of its block, so the pool bounds the
    index.
    """

    __slots__ = ("_buckets", "_hash", "_salt", "keeps_copies", "num_entries")

    def __init__(self, block_hash: BlockHash = chained_hash, salt: int = 0) -> None:
        self._hash = block_hash
        self._salt = salt
        self._buckets: dict[int, list[PrefixEntry]] = {}
        self.keeps_copies = False
        self.num_entries = 0  # blocks with findable content, copies included

    def match(self, contents: Iterable[Content]) -> Iterator[PrefixEntry]:
        """Return the entries of the longest known prefix of `contents`, starting with the first
        block.
        """
        parent: PrefixEntry | None = None
        for content in contents:
            entry = self._find(
                parent, content, self._hash(parent.hash if parent else 0, content, self._salt)
            )
            if entry is None:
                return
            yield entry
            parent = entry

    def blocks_of(self, contents: Iterable[Content]) -> list[int]:
        """Blocks of every known part of this prompt, whether what comes before a part is known or
        not.

        A part is told by its chained hash and its own content alone: a collision adds a block.
        """
        found, hash_ = [], 0
        for content in contents:
            hash_ = self._hash(hash_, content, self._salt)
            entries = self._buckets.get(hash_, ())
            for entry in entries:
                if entry.content == content:
                    found += [entry.block, *(entry.copies or ())]
        return found

    def register(
        self, parent: PrefixEntry | None, content: Content, block: int
    ) -> tuple[PrefixEntry, int | None]:
        """Make `block` findable as `content` after `parent`. Also return the block that was found
        there before.
        """
        hash_ = self._hash(parent.hash if parent else 0, content, self._salt)
        entry = self._find(parent, content, hash_)
        if entry is not None and self.keeps_copies:
            if not entry.names(block):
                entry.copies = [*(entry.copies or ()), block]
                self.num_entries += 1
            return entry, None
        if entry is not None:
            older, entry.block = entry.block, block
            return entry, older
        entry = PrefixEntry(self, parent, content, hash_, block)
        self._buckets.setdefault(hash_, []).append(entry)
        self.num_entries += 1
        return entry, None

    def remove(self, entry: PrefixEntry) -> None:
        """Forget one entry."""
        bucket = self._buckets[entry.hash]
        bucket.remove(entry)
        self.num_entries -= 1
        if not bucket:
            del self._buckets[entry.hash]

    def drop(self, entry: PrefixEntry, block: int) -> None:
        """Forget one block of an entry, and the entry with its last block."""
        copies = entry.copies
        if copies is None:
            self.remove(entry)
            return
        left = [copy for copy in (entry.block, *copies) if copy != block]
        entry.block, entry.copies = left[0], left[1:] or None
        self.num_entries -= 1

    def _find(self, parent: PrefixEntry | None, content: Content, hash_: int) -> PrefixEntry | None:
        for entry in self._buckets.get(hash_, ()):
            if entry.content == content and _same_history(entry.parent, parent):
                entry.parent = parent  # equal by identity from now on
                return entry
        return None


def _same_history(one: PrefixEntry | None, other: PrefixEntry | None) -> bool:
    while one is not other:
        if one is None or other is None or one.content != other.content:
            return False
        one, other = one.parent, other.parent
    return True


class PromptContent:
    """The content of the full blocks of one prompt, as far as the workload tells it."""

    __slots__ = ("_block_size", "_ids", "_ids_per_block", "_per_id", "_prefix_ids", "num_blocks")

    def __init__(
        self,
        num_tokens: int,
        block_size: int,
        prompt_ids: Sequence[int] | None,
        prefix_ids: Sequence[int] | None,
        prefix_block_size: int | None,
    ) -> None:
        """Describe a prompt by its token ids, or by prefix ids, or by neither.

        Token ids are exact. A prefix id represents `prefix_block_size` tokens; that size and
        `block_size` must divide one another. With neither, no block can be shared.
        """
        self._block_size = block_size
        self._ids = prompt_ids
        self._prefix_ids = prefix_ids
        size = prefix_block_size or block_size
        self._per_id = max(size // block_size, 1)  # blocks that one id covers
        self._ids_per_block = max(block_size // size, 1)
        full = num_tokens // block_size
        if prompt_ids is None:
            known = (
                len(prefix_ids) * self._per_id // self._ids_per_block
                if prefix_ids is not None
                else 0
            )
            full = min(full, known)
        self.num_blocks = full

    def __getitem__(self, index: int) -> Content:
        """Return the content of full block `index`.

        A chained id also says what comes before it, so the last id of a block names the block.
        """
        if self._ids is not None:
            start = index * self._block_size
            return tuple(self._ids[start : start + self._block_size])
        assert self._prefix_ids is not None
        last = (index + 1) * self._ids_per_block - 1
        return (self._prefix_ids[last // self._per_id], index % self._per_id)


class BlockPool:
    """Reference counts and the reuse order of `num_blocks` blocks.

    Blocks without an owner wait in one queue and are reused from its head: least recently used
    first. A block keeps matchable content until it is reused. `num_free` counts all blocks without
    an owner, `num_cached` those with matchable content.

    Attributes:
        num_blocks: Blocks that can have an owner.
        unmatchable_first: A released block without matchable content goes to the head of the queue
            instead of the tail. Of several such blocks the last of the table is reused first.
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
        "unmatchable_first",
    )

    def __init__(self, num_blocks: int, num_null: int = 0) -> None:
        """Create a pool without owners.

        Args:
            num_blocks: Blocks that can have an owner. Their numbers begin at `num_null`.
            num_null: Blocks before them that are never given out.
        """
        self.num_blocks = num_blocks
        self.unmatchable_first = False
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_shared_extra = 0  # sum of (references - 1) over owned blocks
        self.refs = [0] * (num_null + num_blocks)
        self.entries: list[PrefixEntry | PrivatePrefix | None] = [None] * len(
            self.refs
        )  # the entry under which a block's content can be matched
        self.targets: set[int] = set()
        self.held: set[int] = set()
        self._line: deque[int] = deque(range(num_null, len(self.refs)))
        self._stale: dict[
            int, int
            # block -> positions in the queue that no longer count, because the block was matched
        ] = {}

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Give the next `count` reusable blocks to one owner each, in reuse order. Their old
        content is forgotten.

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
                        entry.index.drop(entry, block)
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
        """Remove one owner and return the new state of the block.

        A block without an owner goes to the tail of the queue, or with `unmatchable_first` to the
        head if nothing can match it. Releasing a block that has no owner
        is an error of the caller.
        """
        refs = self.refs[block]
        assert refs > 0, f"block {block} has no owner and cannot be freed"
        self.refs[block] = refs - 1
        if refs > 1:
            self.num_shared_extra -= 1
            return BlockState.SHARED if refs > 2 else BlockState.OWNED
        self.num_free += 1
        if self.entries[block] is not None:
            self._line.append(block)
            self.num_cached += 1
            return BlockState.CACHED
        self._queue_unmatchable((block,))
        return BlockState.FREE

    def release_private(self, blocks: Sequence[int], matchable: bool = False) -> None:
        """Free blocks that one owner holds alone, in the given order; all have matchable content,
        or none has.
        """
        refs = self.refs
        for block in blocks:
            assert refs[block] == 1, (
                f"block {block} has {refs[block]} owners and cannot be freed as private"
            )
            refs[block] = 0
        self.num_free += len(blocks)
        if matchable:
            self._line.extend(blocks)
            self.num_cached += len(blocks)
        else:
            self._queue_unmatchable(blocks)

    def _queue_unmatchable(self, blocks: Sequence[int]) -> None:
        """Queue blocks without an owner and without content; the first of them is reused first."""
        if not self.unmatchable_first:
            self._line.extend(blocks)
            return
        stale = {block for block in blocks if block in self._stale}
        if stale:  # a position that no longer counts would be taken for the one at the head
            self._line = deque(block for block in self._line if block not in stale)
            for block in stale:
                del self._stale[block]
        self._line.extendleft(reversed(blocks))

    def register(
        self, index: PrefixIndex, parent: PrefixEntry | None, content: Content, block: int
    ) -> tuple[PrefixEntry, int | None]:
        """Make the content of an owned block matchable as `content` after `parent`.

        An older copy is no longer found. Also return its block where it has no owner: it was
        cached, and is free now.
        """
        entry, older = index.register(parent, content, block)
        freed = None
        if older is not None and older != block:
            self.entries[older] = None
            if not self.refs[older]:
                self.num_cached -= 1
                freed = older
        self.entries[block] = entry
        return entry, freed

    def shareable_entry(self, block: int) -> PrefixEntry:
        """Return the index entry of a block that was just matched by content."""
        entry = self.entries[block]
        assert isinstance(entry, PrefixEntry)
        return entry

    def forget(self, block: int) -> None:
        """Make a block's content unmatchable before it is overwritten. A block without an entry is
        left as it is.
        """
        entry = self.entries[block]
        if isinstance(entry, PrefixEntry):
            entry.index.drop(entry, block)
        self.entries[block] = None

    def forget_each(self, blocks: Iterable[int]) -> list[int]:
        """Make the content of these blocks unmatchable; returns those without owner, now free."""
        freed = []
        for block in blocks:
            if self.entries[block] is not None and not self.refs[block]:
                self.num_cached -= 1
                freed.append(block)
            self.forget(block)
        return freed

    def forget_all(self) -> list[int]:
        """Make every block's content unmatchable. Return the blocks without an owner that were
        matchable, by number.
        """
        cached = [
            block
            for block in range(len(self.refs))
            if self.entries[block] is not None and not self.refs[block]
        ]
        for block in range(len(self.refs)):
            self.forget(block)
        self.num_cached = 0
        return cached

    def count_states(self) -> dict[BlockState, int]:
        """Return the number of blocks in each state. Single blocks are read only where some are
        shared.
        """
        busy = self.held | self.targets
        shared = 0
        if self.num_shared_extra:
            shared = sum(1 for refs in self.refs if refs > 1) - sum(
                1 for block in busy if self.refs[block] > 1
            )
        return {
            BlockState.FREE: self.num_free - self.num_cached,
            BlockState.OWNED: self.num_used - shared - len(busy),
            BlockState.SHARED: shared,
            BlockState.CACHED: self.num_cached,
            BlockState.COMPACTION_TARGET: len(self.targets - self.held),
            BlockState.IN_TRANSIT: len(self.held),
        }

    def state(self, block: int) -> BlockState:
        """Return the state of the block."""
        if block in self.held:
            return BlockState.IN_TRANSIT
        if block in self.targets:
            return BlockState.COMPACTION_TARGET
        if self.refs[block]:
            return BlockState.SHARED if self.refs[block] > 1 else BlockState.OWNED
        return BlockState.FREE if self.entries[block] is None else BlockState.CACHED

    def shared(self, blocks: Iterable[int]) -> int:
        """Return how many leading blocks of a table reach to the last one that has another owner.

        Blocks with one owner may lie between them: when two requests compute the same prefix at the
        same time, the next request shares with each of them the blocks that it registered last.
        """
        return max(
            (place for place, block in enumerate(blocks, 1) if self.refs[block] > 1), default=0
        )

    def _next(self) -> int:
        """Return the head of the reuse queue; positions that no longer count are skipped."""
        block = self._line.popleft()
        while block in self._stale:
            left = self._stale[block] - 1
            if left:
                self._stale[block] = left
            else:
                del self._stale[block]
            block = self._line.popleft()
        return block
