"""Places of one size in host memory, made when an engine is set up and used again and again."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

CHUNK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two: chunks of one lose little


class HostPool:
    """Places of `place_bytes`, pinned where a device copies; whoever frees one says when it has been read.

    They lie in chunks of at most `chunk_bytes` (or one place, if that is larger).
    """

    def __init__(self, num_places: int, place_bytes: int, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Raises MemoryError where there is not that much memory."""
        self.place_bytes = place_bytes
        self._pinned = pinned
        self._chunk_places = max(chunk_bytes // place_bytes, 1)
        self._chunks: list[torch.Tensor] = []
        self._where: list[tuple[int, int]] = []  # of each place: chunk, row in it
        self._free: deque[int] = deque()  # the longest free first: it has most likely been read
        self._readers: dict[int, torch.cuda.Event] = {}  # of free places: what still reads them, perhaps
        self.add(num_places)

    @property
    def num_places(self) -> int:
        """All there are."""
        return len(self._where)

    @property
    def num_free(self) -> int:
        """Those that `take` can give."""
        return len(self._free)

    def add(self, num_places: int) -> None:
        """Make more places. Raises MemoryError where there is not that much memory."""
        while num_places:
            count = min(num_places, self._chunk_places)
            try:
                chunk = torch.empty(count, self.place_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:  # torch has none of its own for host memory
                raise MemoryError(f"no {count * self.place_bytes:,} bytes more: {error}") from error
            self._chunks.append(chunk)
            self._free.extend(range(len(self._where), len(self._where) + count))
            self._where.extend((len(self._chunks) - 1, row) for row in range(count))
            num_places -= count

    def take(self, count: int) -> tuple[list[int], list[torch.cuda.Event]]:
        """So many free places, and the events after which they may be written."""
        assert count <= self.num_free, (
            f"{count} places in host memory are wanted, {self.num_free} of {self.num_places} are free"
        )
        places = [self._free.popleft() for _ in range(count)]
        readers = {event: None for place in places if (event := self._readers.pop(place, None)) is not None}
        return places, list(readers)

    def give_back(self, places: Iterable[int], reader: torch.cuda.Event | None = None) -> None:
        """The places are free when `reader` (None: nothing reads them) has happened."""
        for place in places:
            self._free.append(place)
            if reader is not None:
                self._readers[place] = reader

    def runs(self, places: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The places in order, as memory `[n, place_bytes]` of those that lie together; with the index of its first."""
        first = 0
        for index in range(1, len(places) + 1):
            chunk, row = self._where[places[index - 1]]
            if index == len(places) or self._where[places[index]] != (chunk, row + 1):
                yield first, self._chunks[chunk][row + 1 - (index - first) : row + 1]
                first = index
