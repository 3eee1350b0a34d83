"""The prefix index: which block already holds the keys and values of these tokens after those."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

Content = Hashable  # what one full block holds: its token ids, or an id that stands for them
BlockHash = Callable[[int, Content, int], int]


def chained_hash(parent: int, content: Content, salt: int) -> int:
    """Hash of one block's content after everything before it (tuples of integers hash the same everywhere)."""
    return hash((parent, content, salt))


class PrefixEntry:
    """One block that any request can match: its content, what comes before it, and where it lies."""

    __slots__ = ("block", "content", "hash", "index", "parent")

    def __init__(
        self, index: "PrefixIndex", parent: "PrefixEntry | None", content: Content, hash_: int, block: int
    ) -> None:
        self.index = index
        self.parent = parent
        self.content = content
        self.hash = hash_
        self.block = block


class OwnContent:
    """Marks blocks whose content only the request that wrote them can match again: they need no hash.

    Attributes:
        table: the request's block table when it gave its blocks up; a block of it still counts while it is so marked.
    """

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: list[int] = []


class PrefixIndex:
    """Full blocks by chained hash. The newest copy of equal content is the one that is found.

    On a hit content and history are compared, so a hash collision costs time and never serves wrong keys and values.
    An entry lives exactly as long as its block's content: the index is bounded by the pool.
    """

    __slots__ = ("_buckets", "_hash", "_salt", "num_entries")

    def __init__(self, block_hash: BlockHash = chained_hash, salt: int = 0) -> None:
        self._hash = block_hash
        self._salt = salt
        self._buckets: dict[int, list[PrefixEntry]] = {}
        self.num_entries = 0

    def match(self, contents: Iterable[Content]) -> Iterator[PrefixEntry]:
        """Entries of the longest known prefix of `contents`, from the first block on."""
        parent: PrefixEntry | None = None
        for content in contents:
            entry = self._find(parent, content, self._hash(parent.hash if parent else 0, content, self._salt))
            if entry is None:
                return
            yield entry
            parent = entry

    def register(self, parent: PrefixEntry | None, content: Content, block: int) -> tuple[PrefixEntry, int | None]:
        """Make `block` findable as `content` after `parent`; also returns the block that was found there so far."""
        hash_ = self._hash(parent.hash if parent else 0, content, self._salt)
        entry = self._find(parent, content, hash_)
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

    def _find(self, parent: PrefixEntry | None, content: Content, hash_: int) -> PrefixEntry | None:
        for entry in self._buckets.get(hash_, ()):
            if entry.content == content and _same_history(entry.parent, parent):
                entry.parent = parent  # from now on equal by identity
                return entry
        return None


def _same_history(one: PrefixEntry | None, other: PrefixEntry | None) -> bool:
    while one is not other:
        if one is None or other is None or one.content != other.content:
            return False
        one, other = one.parent, other.parent
    return True


class PromptContent:
    """What the full blocks of one prompt hold, as far as the outside world said."""

    __slots__ = ("_block_size", "_ids", "_ids_per_block", "_per_id", "_prefix_ids", "num_blocks")

    def __init__(
        self,
        num_tokens: int,
        block_size: int,
        prompt_ids: Sequence[int] | None,
        prefix_ids: Sequence[int] | None,
        prefix_block_size: int | None,
    ) -> None:
        """Content of the full blocks of a prompt.

        Token ids are exact. Prefix ids stand for `prefix_block_size` tokens each; that size and `block_size` must
        divide one another. With neither, no block can be shared.
        """
        self._block_size = block_size
        self._ids = prompt_ids
        self._prefix_ids = prefix_ids
        size = prefix_block_size or block_size
        self._per_id = max(size // block_size, 1)  # blocks that one id covers
        self._ids_per_block = max(block_size // size, 1)
        full = num_tokens // block_size
        if prompt_ids is None:
            known = len(prefix_ids) * self._per_id // self._ids_per_block if prefix_ids is not None else 0
            full = min(full, known)
        self.num_blocks = full

    def __getitem__(self, index: int) -> Content:
        """Content of full block `index`; a chained id says what comes before it too, so a block's last id names it."""
        if self._ids is not None:
            start = index * self._block_size
            return tuple(self._ids[start : start + self._block_size])
        assert self._prefix_ids is not None
        last = (index + 1) * self._ids_per_block - 1
        return (self._prefix_ids[last // self._per_id], index % self._per_id)
