"""Faults to plant into the core; each takes a monkeypatch and breaks one thing."""

from itertools import count
from typing import Any

import pytest

from zlab.policies.core import decode as giving_way
from zlab.policies.core import decode as room
from zlab.policies.core import prefill as admitting
from zlab.policies.core import scheduler, state
from zlab.policies.core import scheduler as intake
from zlab.policies.core import state as sharing
from zlab.policies.core.block_pool import BlockPool
from zlab.policies.core.decode_batch import DecodeBatch
from zlab.policies.core.journal import Journal
from zlab.policies.core.plan import StepPlan
from zlab.policies.core.prefill import plan_prefill
from zlab.policies.core.query_slots import QuerySlots
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.core.state import SchedulerState
from zlab.traces.schema import BlockState, EventKind, Phase, Reason, Status

Patch = pytest.MonkeyPatch


def release_forgets_a_block(patch: Patch) -> None:
    real = SchedulerState.release
    patch.setattr(
        SchedulerState, "release", lambda self, request, blocks: real(self, request, blocks[1:])
    )


def retain_forgets_to_count(patch: Patch) -> None:
    def retain(self: BlockPool, block: int) -> None:
        if not self.refs[block]:
            real(self, block)

    real = BlockPool.retain
    patch.setattr(BlockPool, "retain", retain)


def release_frees_shared_blocks(patch: Patch) -> None:
    def release(self: BlockPool, block: int) -> BlockState:
        while self.refs[block] > 1:
            real(self, block)
        return real(self, block)

    real = BlockPool.release
    patch.setattr(BlockPool, "release", release)


def swapped_blocks_are_free_at_once(patch: Patch) -> None:
    def swap_out(state_: SchedulerState, plan: StepPlan, request: Request) -> None:
        real(state_, plan, request)
        state_.pool.held.clear()
        blocks, request.table = request.table, []
        state_.release(request, blocks)

    real = giving_way._swap_out
    patch.setattr(giving_way, "_swap_out", swap_out)


def aborted_compression_keeps_its_blocks(patch: Patch) -> None:
    def abandon(state_: SchedulerState, task: Any) -> None:
        real(state_, task)
        task.request.table = task.request.table[1:]

    real = room.abandon_compression
    patch.setattr(scheduler, "abandon_compression", abandon)


def shared_prefix_is_compressed_in_place(patch: Patch) -> None:
    patch.setattr(room, "_leading", lambda state_, request: (0, 0))


def hit_covers_the_whole_prompt(patch: Patch) -> None:
    """The last token is computed again, but in the block that others own."""

    def match(state_: SchedulerState, request: Request) -> list[int]:
        if state_.index is None:
            return []
        full = min(request.content.num_blocks, request.total_tokens // state_.limits.block_size)
        return [
            entry.block for entry in state_.index.match(request.content[n] for n in range(full))
        ]

    def start(state_: SchedulerState, request: Request, hits: list[int], num_new: int) -> None:
        real(state_, request, hits, num_new)
        request.computed_tokens = min(request.computed_tokens, request.total_tokens - 1)
        state_.book_idle(request, request.computed_tokens)

    real = admitting._start_prefill
    patch.setattr(admitting, "match", match)
    patch.setattr(admitting, "_start_prefill", start)


def prompt_is_matchable_before_it_is_computed(patch: Patch) -> None:
    def start(state_: SchedulerState, request: Request, hits: list[int], num_new: int) -> None:
        real(state_, request, hits, num_new)
        sharing.register_prompt(state_, request, request.prompt_tokens)

    real = admitting._start_prefill
    patch.setattr(admitting, "_start_prefill", start)


def slot_is_given_twice(patch: Patch) -> None:
    def give_back(self: QuerySlots, slot: int) -> None:
        real(self, slot)
        self._free.append(slot)

    real = QuerySlots.give_back
    patch.setattr(QuerySlots, "give_back", give_back)


def window_does_not_need_a_slot(patch: Patch) -> None:
    patch.setattr(room, "_lacks_slot", lambda state_, request, held: False)


def budget_is_not_kept(patch: Patch) -> None:
    patch.setattr(room, "_must_compress", lambda state_, request, held: False)


def refusal_without_event(patch: Patch) -> None:
    def emit(self: Journal, kind: int, request: int, value: int = 0, blocks: Any = ()) -> None:
        if kind != EventKind.REFUSED:
            real(self, kind, request, value, blocks)

    real = Journal.emit
    patch.setattr(Journal, "emit", emit)


def ends_are_told_twice(patch: Patch) -> None:
    def end(
        self: SchedulerState, request: Request, status: Status, reason: int = 0, message: str = ""
    ) -> None:
        real(self, request, status, reason, message)
        self.journal.emit(state.TERMINAL[status], request.number, reason)

    real = SchedulerState.end
    patch.setattr(SchedulerState, "end", end)


def join_drops_a_request(patch: Patch) -> None:
    def join(state_: SchedulerState, plan: StepPlan, task: Any) -> None:
        real(state_, plan, task)
        if task.request.phase is Phase.DECODE:
            state_.decoding.drop(task.request)

    real = room.join_compression
    patch.setattr(scheduler, "join_compression", join)


def victim_is_not_requeued(patch: Patch) -> None:
    patch.setattr(Scheduler, "_requeue", lambda self, request: None)


def too_large_is_let_in(patch: Patch) -> None:
    def admit(state_: SchedulerState, request: Request, asked: Any) -> None:
        request.target_tokens = asked.output_tokens

    patch.setattr(scheduler, "validate_request", admit)


def message_names_no_numbers(patch: Patch) -> None:
    def refuse(state_: SchedulerState, request: Request, asked: Any) -> tuple[Reason, str] | None:
        answer = real(state_, request, asked)
        return answer and (answer[0], "does not fit")

    real = intake.validate_request
    patch.setattr(scheduler, "validate_request", refuse)


def everyone_gives_way(patch: Patch) -> None:
    def find(state_: SchedulerState, plan: StepPlan, request: Request, num: int) -> bool:
        enough = real(state_, plan, request, num)
        for other in list(state_.running.values())[1:]:
            if other is not request and not other.in_flight and other.phase is Phase.DECODE:
                giving_way.preempt(state_, plan, other)
        return enough

    real = room._find_blocks
    patch.setattr(room, "_find_blocks", find)


def prefills_are_thrown_out(patch: Patch) -> None:
    """A hundred times the latest to be prefilled gives way, for nobody."""
    left = [100]

    def decodes(self: Scheduler, plan: StepPlan) -> None:
        real(self, plan)
        for request in reversed(list(self.state.prefilling.values())):
            if left[0]:
                left[0] -= 1
                giving_way.preempt(self.state, plan, request)

    real = Scheduler._plan_decodes
    patch.setattr(Scheduler, "_plan_decodes", decodes)


def newcomers_take_what_was_given_up(patch: Patch) -> None:
    def prefill(state_: SchedulerState, plan: StepPlan, budget: int) -> None:
        state_.admits = state_.admission_due = True
        plan_prefill(state_, plan, budget)

    patch.setattr(scheduler, "plan_prefill", prefill)


def recomputed_tokens_are_forgotten(patch: Patch) -> None:
    def preempt(state_: SchedulerState, plan: StepPlan, request: Request, *why: Any) -> None:
        real(state_, plan, request, *why)
        request.high_water = 0

    real = giving_way.preempt
    patch.setattr(room, "preempt", preempt)


def victim_goes_to_the_end_of_the_line(patch: Patch) -> None:
    turns = count(1000)

    def requeue(self: Scheduler, request: Request) -> None:
        self.state.waiting.push(request, (next(turns),))
        self.state.admission_due = True

    patch.setattr(Scheduler, "_requeue", requeue)


def time_of_a_phase_is_lost(patch: Patch) -> None:
    def enter(self: Request, phase: Phase, now_ns: int) -> None:
        if self.phase is not Phase.PREFILL:
            self.phase_ns[self.phase] += now_ns - self.phase_since
        self.phase, self.phase_since = phase, now_ns

    patch.setattr(Request, "enter", enter)


def first_token_is_stamped_again(patch: Patch) -> None:
    def commit(self: Scheduler, chunk: Any, outcome: Any) -> None:
        chunk.request.first_token_ns = -1
        real(self, chunk, outcome)

    real = Scheduler._commit_chunk
    patch.setattr(Scheduler, "_commit_chunk", commit)


def admission_is_stamped_before_arrival(patch: Patch) -> None:
    def enter(state_: SchedulerState, request: Request) -> None:
        real(state_, request)
        request.first_admitted_ns = request.arrival_ns - 1 if request.arrival_ns else 0

    real = admitting._enter_line
    patch.setattr(admitting, "_enter_line", enter)


def decisions_depend_on_identity(patch: Patch) -> None:
    """As with a set of objects: the order differs from one scheduler to the next."""
    pools: list[BlockPool] = []

    def take(self: BlockPool, amount: int) -> list[int]:
        if not any(pool is self for pool in pools):
            pools.append(self)
            self._line.rotate(len(pools))
        return real(self, amount)

    real = BlockPool.take
    patch.setattr(BlockPool, "take", take)


def growth_is_skipped_in_a_stretch(patch: Patch) -> None:
    def advance(
        self: DecodeBatch, num_steps: int, pool: BlockPool, journal: Journal, *explain: Any
    ) -> list[tuple[int, int]]:
        for tick in range(self.tick, self.tick + num_steps):
            self._growth.take(tick)
        return real(self, num_steps, pool, journal, *explain)

    real = DecodeBatch.fast_forward
    patch.setattr(DecodeBatch, "fast_forward", advance)


def a_stretch_takes_a_step_too_many(patch: Patch) -> None:
    real = Scheduler.uneventful_steps
    patch.setattr(Scheduler, "uneventful_steps", lambda self: real(self) + (1 if real(self) else 0))


def arrivals_do_not_end_a_stretch(patch: Patch) -> None:
    real = Scheduler.uneventful_steps

    def quiet(self: Scheduler) -> int:
        due, self.state.admission_due = self.state.admission_due, False
        steps = real(self)
        self.state.admission_due = due
        return steps

    patch.setattr(Scheduler, "uneventful_steps", quiet)
