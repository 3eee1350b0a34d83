"""The questions a policy is asked; every answer is a small frozen value.

A policy is one value for each question. The scheduler asks at step boundaries only, when something has changed; an
answer may depend on the request and on what it is handed, never on a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from policies.core.request import Request

Key = tuple[float, ...]


class Join(Enum):
    """When a compressed request decodes again."""

    BOUNDARY = "boundary"  # at the next step, whatever else goes on: deterministic
    WHEN_DONE = "when_done"  # at the first step after the copy has finished
    BLOCKING = "blocking"  # in the same step, which waits for it


class NeedsSlot(Enum):
    """When a running request must hold a query slot."""

    NEVER = "never"
    ALWAYS = "always"
    AT_WINDOW = "at_window"  # from its observation window on


class ComesBack(Enum):
    """How a preempted request comes back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool in numbers, as handed to a policy."""

    num_blocks: int
    num_free: int
    num_running: int
    num_waiting: int  # for admission, a block or a slot


class History(Protocol):
    """What has been learned from finished requests."""

    def mean_output(self, cls: str | None) -> float | None:
        """Mean output tokens of finished requests of the class; of all when it has none; None before any finished."""


class Order(Protocol):
    """Who is next in the waiting line?"""

    @property
    def lookahead(self) -> int:
        """How many requests behind a head that does not fit may be tried in its stead (0: the head blocks the line)."""

    @property
    def max_skips(self) -> int:
        """How often one head may be passed over."""

    @property
    def fair_by_session(self) -> bool:
        """Serve the session with the least service so far first; `key` then orders within a session."""

    def key(self, request: Request, history: History) -> Key:
        """Rank when it joins the line; the smallest is next, ties by submission order."""


class Admission(Protocol):
    """When does a waiting request get blocks?"""

    @property
    def counts_hits_as_new(self) -> bool:
        """Ask for room for cached blocks too (and count cached tokens against the token budget)."""

    @property
    def reserves_peak(self) -> bool:
        """Admit only if every running request could grow to the most it may ever hold."""

    def watermark(self, num_blocks: int) -> int:
        """Blocks that must stay free after an admission while others run."""


class Batching(Protocol):
    """What shares a step?"""

    @property
    def prefill_alone(self) -> bool:
        """A step with prefill has no decodes, and prefill goes first."""

    @property
    def cuts_any(self) -> bool:
        """Any prefill may be cut to the token budget; otherwise only the first of a step."""

    @property
    def limit_per_step(self) -> bool:
        """`max_running` bounds one step's requests instead of the number that hold blocks."""


class Slots(Protocol):
    """Who holds a query slot?"""

    @property
    def needed(self) -> NeedsSlot:
        """When a running request must hold one."""

    @property
    def nearest_first(self) -> bool:
        """Free slots go to the request nearest to its window; otherwise in running order, once its last has none."""

    def count(self, num_blocks: int, floor: int | None) -> int:
        """Number of slots for a pool, `floor` being the fewest blocks a compression may leave a request."""


class Budget(Protocol):
    """How many blocks may a request hold while it decodes (`N_max`)?"""

    def floor(self, block_size: int) -> int | None:
        """Fewest blocks at which a request may be told to compress; None: never."""

    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        """May a request with `held` full blocks take one more instead of being compressed?"""

    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        """Blocks after a compression, the empty one included; between the floor and `held`."""


class Preemption(Protocol):
    """Who gives way when blocks run out, and how does it come back?"""

    @property
    def comes_back(self) -> ComesBack:
        """Recompute what was lost, or bring it back from host memory. A compressed request can only be swapped."""

    def rank(self, request: Request, needy: Request) -> int | None:
        """Rank as a victim for `needy` (which may be the request itself): smallest first, the latest of a rank first.

        None: does not give way.
        """


class Prefix(Protocol):
    """What is shared?"""

    @property
    def enabled(self) -> bool:
        """Match full blocks by content."""

    @property
    def keeps(self) -> bool:
        """A compression leaves matchable blocks in place and copies to fresh ones while the pool has room."""


class Compression(Protocol):
    """How are tokens chosen, and when is the result joined?"""

    @property
    def scorer(self) -> str:
        """Name of the engine's scorer."""

    @property
    def window(self) -> int:
        """Observation window `w`, in tokens."""

    @property
    def join(self) -> Join:
        """When a compressed request decodes again."""

    # What follows is for the engine's scorers alone (compressed-paged-attention, sections 3 and 4).

    @property
    def sink(self) -> int:
        """First cache positions that are always kept."""

    @property
    def redundancy_lambda(self) -> float:
        """Weight of attention against redundancy."""

    @property
    def temperature(self) -> float:
        """Of the softmax over redundancy."""

    @property
    def decay(self) -> float:
        """Of the score history at every further compression."""

    @property
    def pool_size(self) -> int:
        """Neighbours whose highest score a token takes at a first compression; odd."""

    @property
    def threshold(self) -> float:
        """Similarity strictly above which two keys are alike."""


@dataclass(frozen=True)
class Policy:
    """One answer to every question."""

    name: str
    order: Order
    admission: Admission
    batching: Batching
    slots: Slots
    budget: Budget
    preemption: Preemption
    prefix: Prefix
    compression: Compression


class ClassMeans:
    """Mean output of finished requests by class: the `History` a scheduler keeps."""

    __slots__ = ("_all", "_by_class")

    def __init__(self) -> None:
        self._all = (0, 0)
        self._by_class: dict[str | None, tuple[int, int]] = {}

    @property
    def seen(self) -> Mapping[str | None, tuple[int, int]]:
        """Class -> (finished requests, their output tokens)."""
        return self._by_class

    def add(self, cls: str | None, output_tokens: int) -> None:
        """Count one finished request."""
        count, total = self._by_class.get(cls, (0, 0))
        self._by_class[cls] = (count + 1, total + output_tokens)
        self._all = (self._all[0] + 1, self._all[1] + output_tokens)

    def mean_output(self, cls: str | None) -> float | None:
        """Mean output tokens of the class, of all classes if it is unknown, or None."""
        count, total = self._by_class.get(cls, self._all)
        return total / count if count else None
