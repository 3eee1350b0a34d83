"""What every step did, as columns of a recording: noted by stretches, unfolded in large pieces."""

from collections.abc import Callable
from typing import Any

import numpy as np

from policies.core.plan import StepPlan
from policies.core.scheduler import Scheduler

NS = 1e-9
STRETCH = (
    "steps", "step", "decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs", "compressions",
    "compressing", "swaps", "preemptions", "running", "waiting", "waiting_for_slot", "waiting_for_block",
    "shared_extra", "idle_tokens", "first_tokens",
)  # fmt: skip
FLUSH_AT = 100_000  # steps


class StepLog:
    """Collects steps; a stretch of steps that differ only in time, context and blocks is one entry.

    `state` counts are read when the step is planned, so they hold while it runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = scheduler.state.limits.block_size
        self._num_blocks = scheduler.state.limits.num_blocks
        self._stretches: list[int] = []
        self._starts_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._blocks: list[tuple[int, int]] = []
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # told of all columns that anybody takes

    @property
    def num_ran(self) -> int:
        """Steps that have run and that nobody has taken."""
        return len(self._ends_ns)

    @property
    def large(self) -> bool:
        """Enough has come together to be written."""
        return len(self._ends_ns) > FLUSH_AT

    def plan(self, plan: StepPlan) -> None:
        """Note what a step is about to do; its times follow with `ran`."""
        pool = self._scheduler.state.pool
        self._note(1, plan.step, plan.num_decodes, plan.context_tokens, plan)
        self._blocks.append((pool.num_free, pool.num_cached))

    def ran(self, start_ns: int, end_ns: int) -> None:
        """The step noted last ran from `start_ns` to `end_ns`."""
        self._starts_ns.append(start_ns)
        self._ends_ns.append(end_ns)

    def quiet(self, first_step: int, context_tokens: int, start_ns: int, ends_ns: list[int], blocks: list[Any]) -> None:
        """Note a stretch of steps that only decoded, back to back."""
        self._note(len(blocks), first_step, self._scheduler.state.decoding.num_requests, context_tokens, None)
        self._blocks += blocks
        self._starts_ns.append(start_ns)
        self._starts_ns += ends_ns[: len(blocks) - 1]
        self._ends_ns += ends_ns[: len(blocks)]

    def _note(self, steps: int, step: int, decodes: int, context: int, plan: StepPlan | None) -> None:
        state = self._scheduler.state
        stalled_for_slot = state.num_waiting_for_slot
        first_tokens = 0
        idle_tokens = state.idle_tokens
        if not decodes:  # members of the decoding set sit this step out; their newest tokens are not written yet
            idle_tokens += state.decoding.context_tokens - state.decoding.num_requests
        if plan is None:
            work = (0, 0, 0, 0, len(state.compressing), 0, 0)
        else:
            chunks = plan.prefills
            first_tokens = sum(1 for chunk in chunks if chunk.last and chunk.request.target_tokens)
            work = (
                len(chunks),
                sum(chunk.count for chunk in chunks),
                sum(chunk.pairs for chunk in chunks),
                len(plan.compressions),
                len(state.compressing),
                len(plan.swaps),
                len(plan.preempted),
            )
        self._stretches += (
            steps, step, decodes, context, *work, len(state.running), len(state.waiting), stalled_for_slot,
            len(state.stalled) - stalled_for_slot, state.pool.num_shared_extra, idle_tokens, first_tokens,
        )  # fmt: skip

    def take(self) -> dict[str, Any] | None:
        """Columns of the `steps` table for all that ran since last time; None if that is nothing.

        Steps that are planned and have not been reported by `ran` stay for the next time.
        """
        num_ran = len(self._ends_ns)
        if not num_ran:
            return None
        under_way = len(self._blocks) - num_ran  # each an entry of its own: only steps that have run are a stretch
        last = len(self._stretches) - under_way * len(STRETCH)
        table = np.array(self._stretches[:last], dtype=np.int64).reshape(-1, len(STRETCH))
        counts = table[:, 0]
        rows = np.repeat(table, counts, axis=0)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns: dict[str, Any] = {name: rows[:, index] for index, name in enumerate(STRETCH) if index > 0}
        columns["step"] = columns["step"] + within
        columns["context_tokens"] = columns["context_tokens"] + within * columns["decodes"]
        blocks = np.array(self._blocks[:num_ran], dtype=np.int64)
        columns["free_blocks"], columns["cached_blocks"] = blocks[:, 0], blocks[:, 1]
        columns["start_s"] = np.array(self._starts_ns, dtype=np.float64) * NS
        columns["end_s"] = np.array(self._ends_ns, dtype=np.float64) * NS
        columns["output_tokens"] = columns["decodes"] + columns.pop("first_tokens")
        doubled = columns["shared_extra"] * self._size  # tokens of shared blocks count once
        written = columns["context_tokens"] + columns["prefill_tokens"]  # what this step adds is there when it ends
        columns["stored_tokens"] = written + columns.pop("idle_tokens") - doubled
        del self._stretches[:last], self._starts_ns[:num_ran], self._ends_ns[:num_ran], self._blocks[:num_ran]
        for listener in self.listeners:
            listener(columns)
        return columns
