"""The scheduler: plan a step, be told how it went, plan the next."""

from collections.abc import Iterator, Sequence

from policies.core.admitting import may_admit, plan_prefill
from policies.core.errors import DuplicateRequestError, UnknownRequestError
from policies.core.events import Kind, Reason, Sink
from policies.core.giving_way import finish_swap_in, finish_swap_out, give_way_at_last, preempt
from policies.core.handing_out import hand_out_slots, may_hand_out
from policies.core.intake import admissible, make_request
from policies.core.limits import Limits
from policies.core.plan import NOTHING, Outcome, PrefillChunk, StepPlan
from policies.core.policy import Join, Policy
from policies.core.prefix import PrefixIndex
from policies.core.replacing import replace_policy, widen
from policies.core.request import Phase, Request, Status
from policies.core.room import abandon_compression, join_compression, make_room
from policies.core.sharing import forget_own, register_prompt
from policies.core.slot_table import SlotTable
from policies.core.state import State
from policies.core.watching import watch
from traces.workload import TraceRequest


class Scheduler:
    """Decides what every step does; owns requests, blocks and slots; has no clock.

    A driver calls, on one thread and in this order: any number of `submit` and `abort`, then `plan`, carries the plan
    out, `commit`; and again. Times are whole nanoseconds and only noted down. The same calls give the same plans on any
    machine; `digest` proves it.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        sink: Sink | None = None,
        index: PrefixIndex | None = None,
        prefix_block_size: int | None = None,
    ) -> None:
        """Raise ConfigError when policy and limits cannot work together.

        `sink` receives the journal's rows in large pieces; `index` is used instead of a fresh prefix index;
        `prefix_block_size` is the number of prompt tokens a prefix id of the workload stands for.
        """
        self.state = State(policy, limits, sink, index)
        self._prefix_block_size = prefix_block_size
        self._ids: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._next_number = 0
        self._compressed: set[int] = set()
        self.next_step = 0

    # requests come and go

    def submit(self, trace_request: TraceRequest, now_ns: int, arrival_ns: int | None = None) -> Request:
        """Take a request in; one that can never be served is refused at once, with the reason in its `message`.

        Raises DuplicateRequestError while another request of the same id lives.
        """
        if trace_request.id in self._ids:
            raise DuplicateRequestError(f"request id {trace_request.id!r} is still alive")
        state = self._at(now_ns)
        request = make_request(
            trace_request,
            self._next_number,
            now_ns if arrival_ns is None else arrival_ns,
            state.limits,
            self._prefix_block_size,
        )
        self._next_number += 1
        request.arrival_step = self.next_step
        state.journal.emit(Kind.ARRIVED, request.number, request.prompt_tokens)
        refusal = admissible(state, request, trace_request)
        if refusal is not None:
            request.status, request.reason, request.message = Status.REFUSED, refusal[0], refusal[1]
            request.phase, request.finish_ns = Phase.DONE, now_ns
            state.journal.emit(Kind.REFUSED, request.number, refusal[0])
            state.ended.append(request)
            return request
        self._ids[request.id] = request
        state.requests[request.number] = request
        state.waiting.push(request, state.policy.order.key(request, state.history))
        if state.policy.order.lookahead or state.waiting.first() is request:
            state.admission_due = True  # otherwise it stands behind one that does not fit
        return request

    def abort(self, id: str, now_ns: int) -> Request:
        """End a request; what a copy in flight uses is given back when it has finished. Raises UnknownRequestError."""
        request = self._ids.get(id)
        if request is None:
            raise UnknownRequestError(f"no living request has the id {id!r}")
        self._at(now_ns)
        self._end(request, Status.ABORTED)
        return request

    def replace_policy(self, policy: Policy, now_ns: int, mark: int = 0) -> None:
        """Let another policy decide from the next plan on, by the rules of docs/DESIGN.md; between `commit` and `plan`.

        `mark` stands for it in the journal and so in the digest (`policies.spec.policy_mark`). Raises ConfigError,
        with nothing changed, when policy and limits cannot work together.
        """
        slots = SlotTable(policy, self.state.limits)
        state = self._at(now_ns)
        for request in replace_policy(state, policy, slots, mark):
            self._finish(request, NOTHING)
        self._compressed.update(task.request.number for task in state.compressing)

    def live(self) -> Iterator[Request]:
        """Every request that has not ended, in submission order, its token counts brought up to now."""
        for request in self.state.requests.values():
            self.state.decoding.settle_if_member(request)
        return iter(self.state.requests.values())

    def take_ended(self) -> list[Request]:
        """Requests that have ended (refused ones too) since this was last asked, in that order."""
        ended, self.state.ended = self.state.ended, []
        return ended

    # steps

    def plan(self, now_ns: int) -> StepPlan | None:
        """Decide the next step; None when there is nothing to do until something arrives or a copy finishes.

        Raises StuckError when work waits that nothing could ever set going.
        """
        state = self._at(now_ns)
        state.journal.flush_when_large()
        plan = StepPlan(self.next_step)
        state.preempted_in_step.clear()
        state.admits = True
        if state.narrow:
            widen(state)
        self._join(plan)
        self._decide(plan)
        while plan.empty and not state.admits:
            self._decide_again(plan)  # everyone gave way and nothing runs: whoever fits now may start at once
        if plan.empty:
            self._unlock(plan)
        if plan.empty:
            watch(state, self.next_step)
            return None
        state.decoding.announce(plan.num_decodes, state.journal)
        return plan

    def commit(self, plan: StepPlan, now_ns: int, outcome: Outcome = NOTHING) -> None:
        """The step has been carried out, ending at `now`: tokens are appended, requests end, blocks come back."""
        state = self._at(now_ns)
        if plan.num_decodes:
            tick = state.decoding.tick
            state.decoding.step()
            ending = {request.line: request for request in state.decoding.take_due(tick)}
            for line in sorted(ending):
                self._finish(ending[line], outcome)
        for chunk in plan.prefills:
            self._commit_chunk(chunk, outcome)
        for number in outcome.stopped:
            if number in state.requests:
                self._finish(state.requests[number], outcome)
        for number, message in outcome.failed.items():
            if number in state.requests:
                self._end(state.requests[number], Status.FAILED, message)
        self._compressed.update(outcome.compressed)
        self.next_step += 1
        state.journal.step = self.next_step

    def finished_compressing(self, numbers: Sequence[int]) -> None:
        """Compressions that finished while no step was running (join `when_done`); the next plan joins them."""
        self._compressed.update(numbers)

    def quiet_steps(self) -> int:
        """How many steps from now on only decode, with nothing to decide but which free block comes next.

        There may be more of them: ask again when these have been taken.
        """
        if self._disturbed():
            return 0
        return self.state.decoding.quiet_steps(self.state.pool)

    def _disturbed(self) -> bool:
        """Whether something besides the decoding set's own calendar may call for a decision in the next step."""
        state = self.state
        if state.prefilling or state.swapping or self._compressed:
            return True
        if state.compressing and state.policy.compression.join is not Join.WHEN_DONE:
            return True
        if state.slots_due and may_hand_out(state):
            return True
        if state.room_due and (state.stalled or state.paused):
            return True
        if state.paused and state.decoding.num_requests < state.limits.step_requests:
            return True
        return state.admission_due and may_admit(state)

    def advance(self, num_steps: int) -> list[tuple[int, int]]:
        """Plan and commit up to `num_steps` (at most `quiet_steps`) at once; returns (free, cached) blocks in each.

        It may stop early; what it did is the same, row for row, as that many calls of `plan` and `commit`.
        """
        state = self.state
        blocks = state.decoding.advance(num_steps, state.pool, state.journal)
        self.next_step = state.journal.step
        return blocks

    def digest(self) -> str:
        """SHA-256 of all decisions so far."""
        return self.state.journal.digest()

    # inside a step

    def _at(self, now_ns: int) -> State:
        assert now_ns >= self.state.now_ns, f"time ran backwards: {now_ns} after {self.state.now_ns}"
        self.state.now_ns = now_ns
        return self.state

    def _decide(self, plan: StepPlan) -> None:
        state = self.state
        if state.policy.batching.prefill_alone:
            plan_prefill(state, plan, state.limits.max_batched_tokens)
            if not plan.prefills:
                self._plan_decodes(plan)
        else:
            self._plan_decodes(plan)
            plan_prefill(state, plan, state.limits.max_batched_tokens - plan.num_decodes)
        self._requeue_preempted()

    def _unlock(self, plan: StepPlan) -> None:
        """All that run are stalled, no copy is in flight: the latest give way until somebody can go on."""
        state = self.state
        while plan.empty and not (state.compressing or state.swapping):
            victim = give_way_at_last(state)
            if victim is None:
                return
            state.preempted_in_step.clear()
            preempt(state, plan, victim)
            self._plan_decodes(plan)
            self._requeue_preempted()
        if plan.empty and not state.running:
            self._decide_again(plan)

    def _decide_again(self, plan: StepPlan) -> None:
        self.state.preempted_in_step.clear()
        self.state.admits = True
        self._decide(plan)

    def _join(self, plan: StepPlan) -> None:
        """Apply what has finished elsewhere: swaps always, compressions as the join rule says."""
        state = self.state
        when_done = state.policy.compression.join is Join.WHEN_DONE
        for task in list(state.compressing):
            if when_done and task.request.number not in self._compressed:
                continue
            if task.request.to_abort:
                abandon_compression(state, task)
                self._end_in_flight(task.request)
            else:
                join_compression(state, plan, task)
        self._compressed.clear()  # each has been joined, or was none of ours
        swaps, state.swapping = state.swapping, []
        for swap in swaps:
            request = swap.request
            (finish_swap_out if swap.out else finish_swap_in)(state, request)
            if request.to_abort:
                self._end_in_flight(request)
            elif swap.out:
                self._requeue(request)

    def _plan_decodes(self, plan: StepPlan) -> None:
        state = self.state
        decoding = state.decoding
        state.room_due = False
        if state.slots_due:
            hand_out_slots(state)
        due = decoding.take_undecided()
        if due or state.stalled or state.paused:
            due += decoding.take_growing()
            due += state.stalled.values()
            due += list(state.paused.values())[: max(state.limits.step_requests - decoding.num_requests, 0)]
            due.sort(key=lambda request: request.line)
            for request in filter(_goes_on, due):
                make_room(state, plan, request)
        else:
            lacking = decoding.grow_all(state.pool, state.journal)
            while lacking:  # the first finds room, the others take of it what they need
                make_room(state, plan, lacking[0])
                lacking = decoding.grow(list(filter(_goes_on, lacking[1:])), state.pool, state.journal)
        plan.num_decodes = decoding.num_requests
        plan.context_tokens = decoding.context_tokens

    def _commit_chunk(self, chunk: PrefillChunk, outcome: Outcome) -> None:
        state, request = self.state, chunk.request
        end = chunk.start + chunk.count
        request.recomputed_tokens += max(0, min(end, request.high_water) - chunk.start)
        request.computed_tokens = end
        state.book_idle(request, end)
        register_prompt(state, request, end)
        if not chunk.last:
            return
        del state.prefilling[request.line]
        if request.target_tokens > 0:
            request.generated += 1
            if request.first_token_ns < 0:
                request.first_token_ns = state.now_ns
        state.journal.emit(Kind.FIRST, request.number, request.generated)
        if request.generated >= request.target_tokens:
            self._finish(request, outcome)
        else:
            request.cache_tokens = end + 1
            state.start_decoding(request)

    def _finish(self, request: Request, outcome: Outcome) -> None:
        """A token that stops counts before the limit it meets; a forced length only below the limit tells of a stop."""
        self.state.decoding.settle_if_member(request)
        stopped = request.number in outcome.stopped
        assert stopped or request.generated >= request.target_tokens
        if request.forced_output_tokens == request.target_tokens:
            stopped |= request.max_tokens is None or request.forced_output_tokens < request.max_tokens
        self._end(request, Status.FINISHED, reason=Reason.STOP if stopped else Reason.LENGTH)

    def _end(self, request: Request, status: Status, message: str = "", reason: int = 0) -> None:
        """The terminal event, now or when a copy in flight has finished (the id is free again at once)."""
        if request.to_abort:
            return  # its end is decided already
        del self._ids[request.id]
        if request.in_flight:
            request.to_abort = True
            request.status, request.reason, request.message = status, reason, message
            return
        forget_own(self.state, request)
        self.state.end(request, status, reason, message)

    def _end_in_flight(self, request: Request) -> None:
        status, request.status = request.status, Status.LIVE
        forget_own(self.state, request)
        self.state.end(request, status, request.reason, request.message)

    def _requeue_preempted(self) -> None:
        for request in self.state.preempted_in_step:
            if not request.in_flight:
                self._requeue(request)

    def _requeue(self, request: Request) -> None:
        state = self.state
        state.waiting.push(request, state.policy.order.key(request, state.history))
        state.admission_due = True


def _goes_on(request: Request) -> bool:
    """It still runs, has been computed, and no copy uses its blocks."""
    return request.line >= 0 and not request.in_flight and request.phase is not Phase.PREFILL
