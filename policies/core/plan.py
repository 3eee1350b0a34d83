"""What crosses between scheduler and driver: limits, the plan of a step, its outcome, statistics,
errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from zlab.policies.core.request import Request


def prefill_pairs(start: int, count: int) -> int:
    """Return the (query, key) pairs of `count` tokens after `start` others.

    Every token attends to all tokens before it and to itself.
    """
    return start * count + count * (count + 1) // 2


@dataclass(slots=True)
class PrefillChunk:
    """Compute the tokens at positions `start .. start + count - 1` of a request; its table already
    covers them.

    `last` says that the chunk ends with the newest token, whose logits give the next one.
    """

    request: Request
    start: int
    count: int
    last: bool

    @property
    def pairs(self) -> int:
        """(Query, key) pairs of the chunk's causal attention."""
        return prefill_pairs(self.start, self.count)


@dataclass(slots=True)
class CompressionTask:
    """Reduce a request's full `sources` blocks to the first `len(targets) - 1` blocks of `targets`.

    Targets may be sources. A source that is not a target is only read, and is in `dropped` once the
    copy has finished.
    """

    request: Request
    sources: list[int]
    targets: list[int]
    dropped: list[int]
    source_tokens: int
    kept_tokens: int
    first: bool  # never compressed before


@dataclass(slots=True)
class SwapTask:
    """Copy `blocks` of a request to host memory (`out`) or back."""

    request: Request
    blocks: list[int]
    out: bool


@dataclass(slots=True)
class StepPlan:
    """One step. Its decodes are the decode batch: `num_decodes` requests that read `context_tokens`
    positions.
    """

    step: int
    num_decodes: int = 0
    context_tokens: int = 0
    prefills: list[PrefillChunk] = field(default_factory=list)
    compressions: list[CompressionTask] = field(default_factory=list)  # started in this step
    joined: list[CompressionTask] = field(
        default_factory=list
    )  # their requests run again from this step on
    swaps: list[SwapTask] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that the prefill chunks compute."""
        return sum(chunk.count for chunk in self.prefills)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not (self.num_decodes or self.prefills or self.compressions or self.swaps)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a driver found out while it carried out a step, by request number.

    Attributes:
        stopped: Requests whose newest token ended them (end of sequence, stop string).
        compressed: Requests whose compression has finished; needed with join `when_done` only.
        failed: Requests that cannot go on, with the reason. A failure counts before anything else
            that the step says of its request: the token of the step is worth nothing, so the
            request neither stopped nor met its length. The blocks of a request that is being
            compressed stay in transit until the compression is over (with join `when_done`: until
            it is reported as finished, too).
    """

    stopped: Sequence[int] = ()
    compressed: Sequence[int] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


EMPTY_OUTCOME = StepOutcome()


class SchedulerError(Exception):
    """Root of all errors that the scheduler raises."""


class ConfigError(SchedulerError, ValueError):
    """Limits and policy cannot work together; the message names the numbers."""


class DuplicateRequestError(SchedulerError, ValueError):
    """A request id was submitted again while its request lives."""


class UnknownRequestError(SchedulerError, KeyError):
    """No live request has this id."""


class StuckError(SchedulerError, RuntimeError):
    """Nothing ran, nothing is in flight, and requests wait: an error of a policy, reported instead
    of hanging.
    """


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that hold for a whole run.

    Attributes:
        num_blocks: Blocks in the pool.
        block_size: Tokens of a block.
        max_batched_tokens: Tokens that a step may compute, decodes included.
        max_running: Requests that may hold blocks at the same time, or share a step where the
            policy limits the step.
        max_model_len: Prompt and output tokens of one request together.
        host_blocks: Blocks of host memory for swapped requests.
    """

    num_blocks: int
    block_size: int = 16
    max_batched_tokens: int = 8192
    max_running: int = 256
    max_model_len: int = 40960
    host_blocks: int = 0

    @property
    def step_requests(self) -> int:
        """Number of requests that may decode in one step; each computes one token."""
        return min(self.max_running, self.max_batched_tokens)

    def __post_init__(self) -> None:
        """Raise ConfigError on a size below one."""
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name == "host_blocks" else 1
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{item.name} must be a whole number of at least {least}, not {value!r}"
                )


class StepCounts(NamedTuple):
    """Counts that a row of the steps table needs; `SchedulerStats` explains each of them."""

    num_decoding: int
    context_tokens: int
    num_compressing: int
    num_running: int
    num_waiting: int
    num_waiting_for_slot: int
    num_stalled: int
    num_shared_extra: int
    idle_tokens: int
    num_free_blocks: int
    num_cached_blocks: int


class SchedulerStats(NamedTuple):
    """The scheduler in numbers, as it is now.

    Attributes:
        num_requests: Requests that have not ended.
        num_waiting: Requests in the waiting queue; they hold no blocks.
        num_running: Requests that hold blocks, in any phase.
        num_decoding: Running requests that take part in the next decode step.
        num_stalled: Running requests that cannot decode until a query slot or a block is free.
        num_waiting_for_slot: Those of the stalled requests that wait for a query slot.
        num_paused: Running requests beyond the limit of requests in one step.
        num_compressing: Compressions in flight.
        num_swapping_out: Copies to host memory in flight.
        num_swapping_in: Copies from host memory in flight.
        context_tokens: Cache positions of all decoding requests together.
        idle_tokens: Cache positions of running requests that do not decode.
        num_free_blocks: Blocks without an owner, cached ones included.
        num_cached_blocks: Blocks without an owner whose content a prefix can match.
        num_shared_extra: Owners of blocks beyond the first owner of each block.
        num_slots: Query slots of the policy.
        num_free_slots: Query slots that no request holds.
    """

    num_requests: int
    num_waiting: int
    num_running: int
    num_decoding: int
    num_stalled: int
    num_waiting_for_slot: int
    num_paused: int
    num_compressing: int
    num_swapping_out: int
    num_swapping_in: int
    context_tokens: int
    idle_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_shared_extra: int
    num_slots: int
    num_free_slots: int
