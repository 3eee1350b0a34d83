"""Several servers that each run the whole application: what the front knows of them, and how it reaches one."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.server.replicas_call import Forwarded, Part


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that answers when asked.

    Attributes:
        id: of this process; a replica that is started anew has another.
        name: "0", "1", ...; a replica that takes the place of a dead one has its name.
        pid: of its process.
        block_size, num_blocks: of its cache, in tokens and blocks, all lanes together.
        shares_prefixes: whether its policy finds blocks of earlier requests again.
        digests: of the policy of each lane.
        trouble: why it should not be sent requests; None if it is well.
    """

    id: str
    name: str
    pid: int
    block_size: int
    num_blocks: int
    shares_prefixes: bool
    digests: tuple[tuple[str, str], ...] = ()
    trouble: str | None = None


class ReplicaLostError(Exception):
    """The replica has died, or cannot be reached, before its answer was complete."""


class Fleet(Protocol):
    """The replicas, wherever they run."""

    @property
    def num_wanted(self) -> int:
        """How many there should be."""

    async def members(self) -> Sequence[Member]:
        """Those that answer now."""

    def forward(self, request: Forwarded, replica: str) -> AsyncGenerator[Part]:
        """The answer of the replica with that id. Closing the iterator calls the request off.

        Raises ReplicaLostError, BrokenAnswerError.
        """
