"""The questions that a policy answers; every answer is a small frozen value.

The scheduler asks at step boundaries only, when something has changed. An answer may depend on the
request and on its arguments, never on a clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass
from enum import Enum
from math import ceil
from typing import Any, ClassVar, Protocol

from zlab.policies.core.request import Request

Key = tuple[float, ...]
SINCE = "since"  # key of a field's metadata


def since(release: str) -> Mapping[str, str]:
    """Return the metadata of a field that release 0.1.0 does not have.

    The field may be a setting of an answer, or a further answer of `Policy` itself. It is declared
    as `margin: int = field(default=0, metadata=since("0.2.0"))`, with an immutable default.

    A policy that leaves the field at its default has the digest, the mark and the stored TOML that
    it had before the field existed. Stored policies, evidence and recordings of older releases
    therefore stay valid. For the same reason the default must do what the older release does, and
    it must never change.
    """
    return {SINCE: release}


def is_later_default(item: Field[Any], value: Any) -> bool:
    """Return whether the field came after release 0.1.0 and the value is its default."""
    return SINCE in item.metadata and type(value) is type(item.default) and value == item.default


class Join(Enum):
    """When a compressed request decodes again."""

    BOUNDARY = "boundary"  # at the next step in any case: deterministic
    WHEN_DONE = "when_done"  # at the first step after the copy has finished
    BLOCKING = "blocking"  # in the same step, which waits for it


class NeedsSlot(Enum):
    """When a running request must hold a query slot."""

    NEVER = "never"
    ALWAYS = "always"
    AT_WINDOW = "at_window"  # from its observation window on


class Findable(Enum):
    """From when on a full block of a prompt can be matched."""

    COMPUTED = "computed"  # when the step that computes it is over
    PLANNED = "planned"  # when the step that computes it is planned


class Recovery(Enum):
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
    """What the scheduler has learned from finished requests."""

    def mean_output(self, cls: str | None) -> float | None:
        """Return the mean output tokens of finished requests of a class.

        It is the mean of all classes where the class has none, and None before any has finished.
        """


class Order(ABC):
    """Which waiting request is next?

    The base class of every order. A class of the user's own needs `key` alone; the other members
    have defaults. It is named as `FILE.py:Class` where a policy is named, and the preset `base`
    answers the other questions.
    """

    question: ClassVar[str] = "order"
    base: ClassVar[str] = "hybrid"

    @property
    def lookahead(self) -> int:
        """Number of requests behind the head that are tried when the head does not fit."""
        return 0

    @property
    def max_skips(self) -> int:
        """How often one head may be passed over."""
        return 16

    @property
    def fair_by_session(self) -> bool:
        """Whether the session with the least service so far is next.

        `key` then orders the requests of one session.
        """
        return False

    @abstractmethod
    def key(self, request: Request, stats: History) -> Key:
        """Return the rank of a request that joins the waiting queue.

        The smallest is next; the earlier submission decides between equal ranks.
        """


class Admission:
    """When does a waiting request get blocks?"""

    question: ClassVar[str] = "admission"
    base: ClassVar[str] = "hybrid"

    @property
    def counts_hits_as_new(self) -> bool:
        """Whether cached blocks and tokens count like new ones."""
        return False

    @property
    def reserves_peak(self) -> bool:
        """Whether a request is admitted only if every running request could grow to the most
        blocks it may ever hold.
        """
        return False

    @property
    def checks_chunk_only(self) -> bool:
        """Whether a request is admitted as soon as its first chunk has blocks; `takes_by_chunk`
        then holds, too.
        """
        return False

    @property
    def takes_by_chunk(self) -> bool:
        """Whether a request gets the blocks of each prefill chunk with that chunk, not its whole
        table at admission.
        """
        return False

    @property
    def null_blocks(self) -> int:
        """Blocks at the start of the pool that are never given out."""
        return 0

    def watermark(self, num_blocks: int) -> int:
        """Return how many blocks must stay free after an admission while others run."""
        return ceil(num_blocks * 0.01)


class Batching:
    """What shares a step?"""

    question: ClassVar[str] = "batching"
    base: ClassVar[str] = "hybrid"

    @property
    def prefill_alone(self) -> bool:
        """Whether a step with prefill has no decodes, and prefill goes first."""
        return False

    @property
    def cuts_any(self) -> bool:
        """Whether any prefill may be cut to the token budget, and not only the first of a step."""
        return True

    @property
    def limit_per_step(self) -> bool:
        """Whether `max_running` bounds one step's requests, not those that hold blocks."""
        return False

    @property
    def in_running_order(self) -> bool:
        """Whether decodes and prefill chunks are planned in one walk over the running list.

        A request is left out of the step when the token budget ends before it.
        """
        return False

    @property
    def stops_at_own_preemption(self) -> bool:
        """Whether that walk ends when a request that needs blocks is itself the victim."""
        return True

    @property
    def chunk_limit(self) -> int:
        """Most tokens of one prefill chunk; 0: the token budget alone is the limit."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step is planned before the output of the step before it has returned.

        A request then keeps its blocks for one step after its last token was computed.
        """
        return False


class Slots:
    """Which request holds a query slot?"""

    question: ClassVar[str] = "slots"
    base: ClassVar[str] = "hybrid"

    @property
    def needed(self) -> NeedsSlot:
        """When a running request must hold one."""
        return NeedsSlot.AT_WINDOW

    @property
    def nearest_first(self) -> bool:
        """Whether free slots go to the request nearest to its window.

        Otherwise they go in running order, once the last running request has none.
        """
        return True

    def count(self, num_blocks: int, floor: int | None) -> int:
        """Return the number of slots for a pool.

        `floor` is the fewest blocks that a compression may leave a request.
        """
        return num_blocks // floor if floor else 0


class Budget(ABC):
    """How many blocks may a request hold while it decodes (`N_max`)?

    The base class of every budget. A class of the user's own needs `floor` alone.
    """

    question: ClassVar[str] = "budget"
    base: ClassVar[str] = "hybrid"

    @abstractmethod
    def floor(self, block_size: int) -> int | None:
        """Return the fewest blocks at which a request may be compressed; None: it never is."""

    def may_grow(self, held: int, block_size: int, pool: PoolView) -> bool:
        """Return whether a request with `held` full blocks may take one more.

        Otherwise it is compressed.
        """
        floor = self.floor(block_size)
        return floor is None or held < floor

    def shrink_to(self, held: int, block_size: int, pool: PoolView) -> int:
        """Return the blocks after a compression, the empty one included.

        The number lies between the floor and `held`.
        """
        floor = self.floor(block_size)
        return held if floor is None else floor


class Preemption(ABC):
    """Which request is preempted when blocks run out, and how does it come back?

    The base class of every preemption. A class of the user's own needs `rank` alone.
    """

    question: ClassVar[str] = "preemption"
    base: ClassVar[str] = "hybrid"

    @property
    def comes_back(self) -> Recovery:
        """Whether a victim is recomputed, or its blocks come back from host memory.

        A compressed request can only be swapped.
        """
        return Recovery.RECOMPUTE

    @property
    def least_is_zero(self) -> bool:
        """Whether 0 is the smallest rank, so that the search for a victim ends with it."""
        return True

    @property
    def keeps_withdrawn(self) -> bool:
        """Whether the blocks of a chunk that is withdrawn from the step stay matchable, although
        nothing computes them.
        """
        return False

    @abstractmethod
    def rank(self, request: Request, needy: Request) -> float | None:
        """Return the rank of `request` as a victim for `needy`, which may be the request itself.

        The smallest rank is preempted first, and the latest request of a rank first. None: the
        request is not preempted. With `least_is_zero` the search ends at the first rank of 0.
        """

    def rank_with_blocks(
        self, request: Request, needy: Request, num_tokens: int, num_owned: Callable[[], int]
    ) -> float | None:
        """Return the rank where it depends on what the request holds.

        Args:
            request: The request that may be the victim.
            needy: The request that needs blocks.
            num_tokens: Prompt and output tokens of the request so far.
            num_owned: Returns the blocks that the request alone owns.
        """
        return self.rank(request, needy)


class Prefix:
    """What is shared?"""

    question: ClassVar[str] = "prefix"
    base: ClassVar[str] = "hybrid"

    @property
    def enabled(self) -> bool:
        """Whether full blocks are matched by content."""
        return True

    @property
    def findable(self) -> Findable:
        """From when on a full block of a prompt can be matched."""
        return Findable.COMPUTED

    @property
    def keeps_copies(self) -> bool:
        """Whether all blocks with equal content stay findable, the one registered first before
        the others.
        """
        return False

    @property
    def unmatchable_first(self) -> bool:
        """Whether released blocks without matchable content are reused before all others.

        The full blocks of an ended request then keep their content, its output included.
        """
        return False

    @property
    def keeps(self) -> bool:
        """Whether a compression leaves matchable blocks in place.

        It then copies to fresh blocks while the pool has room.
        """
        return True


class Compression:
    """How are tokens chosen, and when is the result joined?

    The defaults are those of the Zipage paper (arXiv 2603.08743).
    """

    question: ClassVar[str] = "compression"
    base: ClassVar[str] = "hybrid"

    @property
    def scorer(self) -> str:
        """Name of the scorer."""
        return "attention+global+lightning"

    @property
    def needs_queries(self) -> bool:
        """Whether the scorer reads the queries of the window.

        A request then needs a slot before it is compressed.
        """
        return True

    @property
    def window(self) -> int:
        """Observation window `w`, in tokens."""
        return 16

    @property
    def join(self) -> Join:
        """When a compressed request decodes again."""
        return Join.BOUNDARY

    # the rest is for the engine's scorers (compressed-paged-attention, sections 3 and 4)

    @property
    def sink(self) -> int:
        """First cache positions that are always kept."""
        return 0

    @property
    def redundancy_lambda(self) -> float:
        """Weight of attention against redundancy."""
        return 0.2

    @property
    def temperature(self) -> float:
        """Temperature of the softmax over redundancy."""
        return 0.4

    @property
    def decay(self) -> float:
        """Factor of the score history at every further compression."""
        return 0.8

    @property
    def pool_size(self) -> int:
        """Neighbours whose highest score a token takes at a first compression; odd."""
        return 5

    @property
    def threshold(self) -> float:
        """Similarity strictly above which two keys are alike."""
        return 0.5

    @property
    def recent(self) -> int:
        """Latest tokens that are always kept, at most half of what a compression keeps."""
        return 0


ANSWERS: Mapping[str, type[Any]] = {
    answer.question: answer
    for answer in (Order, Admission, Batching, Slots, Budget, Preemption, Prefix, Compression)
}


@dataclass(frozen=True)
class Policy:
    """One answer to each question."""

    name: str
    order: Order
    admission: Admission
    batching: Batching
    slots: Slots
    budget: Budget
    preemption: Preemption
    prefix: Prefix
    compression: Compression

    def window(self, block_size: int) -> int:
        """Return the tokens of the observation window in a pool with blocks of this size.

        A window longer than a block is refused where a window is needed (`QuerySlots`) and has no
        meaning elsewhere.
        """
        return min(self.compression.window, block_size)

    @property
    def simulation_only(self) -> str | None:
        """Why an engine cannot run this policy; None where it can."""
        if self.batching.is_asynchronous:
            return (
                f"policy {self.name!r} plans asynchronous steps (batching.asynchronous = true): "
                "the engine commits a step before it plans the next one, so only the simulator "
                "runs it; leave the setting out for the synchronous rules"
            )
        if self.preemption.keeps_withdrawn:
            return (
                f"policy {self.name!r} leaves withdrawn blocks findable (preemption.withdrawn = "
                "findable): a request could read keys and values that were never written, so only "
                "the simulator runs it; preemption.withdrawn = forgotten is safe"
            )
        return None


class ClassMeans:
    """The mean output of finished requests by class: the `History` that a scheduler keeps."""

    __slots__ = ("_all", "_by_class")

    def __init__(self) -> None:
        self._all = (0, 0)
        self._by_class: dict[str | None, tuple[int, int]] = {}

    @property
    def seen(self) -> Mapping[str | None, tuple[int, int]]:
        """Maps a class to (finished requests, their output tokens)."""
        return self._by_class

    def add(self, cls: str | None, output_tokens: int) -> None:
        """Count one finished request."""
        count, total = self._by_class.get(cls, (0, 0))
        self._by_class[cls] = (count + 1, total + output_tokens)
        self._all = (self._all[0] + 1, self._all[1] + output_tokens)

    def mean_output(self, cls: str | None) -> float | None:
        """Return the mean output tokens of the class, of all classes if it is unknown, or None."""
        count, total = self._by_class.get(cls, self._all)
        return total / count if count else None
