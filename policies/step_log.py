"""Columns of a recording: what each step did, and the scheduler's events, blocks and requests.

Steps are collected in runs of equal steps and expanded in large pieces.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zlab.policies.core.journal import Int64Array
from zlab.policies.core.plan import StepCounts, StepPlan
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.traces.schema import (
    CAUSE_COLUMNS,
    EVENT_COLUMNS,
    PHASES,
    REPORT_COLUMNS,
    EventKind,
    Phase,
    Reason,
)

NS = 1e-9
STRETCH = (
    "steps",
    "step",
    "decodes",
    "context_tokens",
    "prefills",
    "prefill_tokens",
    "prefill_pairs",
    "compressions",
    "compressing",
    "swaps",
    "preemptions",
    "running",
    "waiting",
    "waiting_for_slot",
    "waiting_for_block",
    "shared_extra",
    "idle_tokens",
    "first_tokens",
)
FLUSH_AT = 100_000  # steps


class StepLog:
    """Collects steps; consecutive steps that differ only in time, context and blocks are one entry.

    Counts are read when the step is planned, so they hold while it runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = scheduler.limits.block_size
        self._num_blocks = scheduler.limits.num_blocks
        self._stretches: list[int] = []
        self._starts_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._blocks: list[tuple[int, int]] = []
        self.listeners: list[
            Callable[[dict[str, Any]], None]
        ] = []  # called with all columns that are taken

    @property
    def num_ran(self) -> int:
        """Number of steps that have run and were not taken yet."""
        return len(self._ends_ns)

    @property
    def large(self) -> bool:
        """Whether enough steps are collected to be written."""
        return len(self._ends_ns) > FLUSH_AT

    def plan(self, plan: StepPlan) -> None:
        """Record what a step is about to do; `ran` adds its times."""
        counts = self._scheduler.step_counts()
        self._note(1, plan.step, plan.num_decodes, plan.context_tokens, plan, counts)
        self._blocks.append((counts.num_free_blocks, counts.num_cached_blocks))

    def ran(self, start_ns: int, end_ns: int) -> None:
        """Record that the last planned step ran from `start_ns` to `end_ns`."""
        self._starts_ns.append(start_ns)
        self._ends_ns.append(end_ns)

    def quiet(
        self,
        first_step: int,
        context_tokens: int,
        start_ns: int,
        ends_ns: list[int],
        blocks: list[Any],
    ) -> None:
        """Record consecutive steps that only decoded."""
        counts = self._scheduler.step_counts()
        self._note(len(blocks), first_step, counts.num_decoding, context_tokens, None, counts)
        self._blocks += blocks
        self._starts_ns.append(start_ns)
        self._starts_ns += ends_ns[: len(blocks) - 1]
        self._ends_ns += ends_ns[: len(blocks)]

    def _note(
        self,
        steps: int,
        step: int,
        decodes: int,
        context: int,
        plan: StepPlan | None,
        counts: StepCounts,
    ) -> None:
        first_tokens = 0
        idle_tokens = counts.idle_tokens
        if not decodes:
            # The decode batch sits this step out; its newest tokens are not written yet.
            idle_tokens += counts.context_tokens - counts.num_decoding
        if plan is None:
            work = (0, 0, 0, 0, counts.num_compressing, 0, 0)
        else:
            chunks = plan.prefills
            first_tokens = sum(1 for chunk in chunks if chunk.last and chunk.request.target_tokens)
            work = (
                len(chunks),
                sum(chunk.count for chunk in chunks),
                sum(chunk.pairs for chunk in chunks),
                len(plan.compressions),
                counts.num_compressing,
                len(plan.swaps),
                len(plan.preempted),
            )
        self._stretches += (
            steps,
            step,
            decodes,
            context,
            *work,
            counts.num_running,
            counts.num_waiting,
            counts.num_waiting_for_slot,
            counts.num_stalled - counts.num_waiting_for_slot,
            counts.num_shared_extra,
            idle_tokens,
            first_tokens,
        )

    def take(self) -> dict[str, Any] | None:
        """Return columns of the `steps` table for all steps that ran since the last call, or None.

        Steps that are planned and not reported by `ran` stay for the next call.
        """
        num_ran = len(self._ends_ns)
        if not num_ran:
            return None
        under_way = (
            len(self._blocks) - num_ran
        )  # each is an entry of its own: only steps that have run are joined
        last = len(self._stretches) - under_way * len(STRETCH)
        table = np.array(self._stretches[:last], dtype=np.int64).reshape(-1, len(STRETCH))
        counts = table[:, 0]
        rows = np.repeat(table, counts, axis=0)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns: dict[str, Any] = {
            name: rows[:, index] for index, name in enumerate(STRETCH) if index > 0
        }
        columns["step"] = columns["step"] + within
        columns["context_tokens"] = columns["context_tokens"] + within * columns["decodes"]
        blocks = np.array(self._blocks[:num_ran], dtype=np.int64)
        columns["free_blocks"], columns["cached_blocks"] = blocks[:, 0], blocks[:, 1]
        columns["start_s"] = np.array(self._starts_ns, dtype=np.float64) * NS
        columns["end_s"] = np.array(self._ends_ns, dtype=np.float64) * NS
        columns["output_tokens"] = columns["decodes"] + columns.pop("first_tokens")
        doubled = columns["shared_extra"] * self._size  # tokens of shared blocks count once
        written = (
            columns["context_tokens"] + columns["prefill_tokens"]
        )  # what this step adds is there when it ends
        columns["stored_tokens"] = written + columns.pop("idle_tokens") - doubled
        del (
            self._stretches[:last],
            self._starts_ns[:num_ran],
            self._ends_ns[:num_ran],
            self._blocks[:num_ran],
        )
        for listener in self.listeners:
            listener(columns)
        return columns


Columns = dict[str, Any]

# The state of a block after an event of each kind, -1 where the kind names no block. HIT and LEFT
# say SHARED, though their blocks may have one owner.
_STATE = np.full(max(EventKind) + 1, -1, dtype=np.int8)
for _kind in EventKind:
    if _kind.effect.state is not None:
        _STATE[_kind] = _kind.effect.state


def event_columns(rows: Int64Array) -> Columns:
    """Return columns of the `events` table from journal rows [n, 5]."""
    return {name: rows[:, index] for index, name in enumerate(EVENT_COLUMNS)}


def block_columns(rows: Int64Array, blocks: Int64Array) -> Columns:
    """Return columns of the `blocks` table: one row for every block that an event names."""
    counts = rows[:, 4]
    kinds = np.repeat(rows[:, 1], counts)
    return {
        "step": np.repeat(rows[:, 0], counts),
        "block": blocks,
        "state": _STATE[kinds],
        "kind": kinds,
        "request": np.repeat(rows[:, 2], counts),
    }


def report_columns(reports: Int64Array) -> Columns:
    """Columns of the `reports` table from rows [n, 5] of `Scheduler.take_reports`."""
    return {name: reports[:, index] for index, name in enumerate(REPORT_COLUMNS)}


def cause_columns(causes: Int64Array) -> Columns:
    """Columns of the `causes` table from rows [n, 9] of `Scheduler.take_causes`."""
    return {name: causes[:, index] for index, name in enumerate(CAUSE_COLUMNS)}


def request_columns(requests: Sequence[Request], steps: Sequence[int]) -> Columns:
    """Return columns of the `requests` table; `steps` holds the step in which each ended (-1: still
    alive).
    """
    columns: Columns = {
        "number": [request.number for request in requests],
        "id": [request.id for request in requests],
        "status": [request.status.label for request in requests],
        "reason": [Reason(request.reason).label if request.reason else "" for request in requests],
        "message": [request.message for request in requests],
        "session": [request.session for request in requests],
        "cls": [request.cls for request in requests],
        "priority": [request.priority for request in requests],
        "arrival_s": [request.arrival_ns * NS for request in requests],
        "arrival_step": [request.arrival_step for request in requests],
        "finish_step": list(steps),
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "max_tokens": [request.max_tokens for request in requests],
        "output_tokens": [request.generated for request in requests],
        "asked_output_tokens": [request.forced_output_tokens for request in requests],
        "prefix_hit_tokens": [request.hit_tokens for request in requests],
        "recomputed_tokens": [request.recomputed_tokens for request in requests],
        "preemptions": [request.preemptions for request in requests],
        "swaps": [request.swaps for request in requests],
        "compressions": [request.compressions for request in requests],
    }
    for moment in ("first_admitted", "first_token", "finish"):
        times = np.array(
            [getattr(request, f"{moment}_ns") for request in requests], dtype=np.float64
        )
        columns[f"{moment}_s"] = np.where(times < 0, np.nan, times * NS)
    phases = (
        np.array([request.phase_ns for request in requests], dtype=np.float64).reshape(
            len(requests), len(Phase)
        )
        * NS
    )
    for label in PHASES:
        members = [phase for phase in Phase if phase.label == label]
        columns[f"{label}_s"] = phases[:, members].sum(axis=1)
    return columns
