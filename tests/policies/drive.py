"""Two drivers for the scheduler, every step or quiet stretches at once; both note all that
happens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from tests.policies.shadow import Shadow
from zlab.policies.core.block_pool import PrefixIndex
from zlab.policies.core.invariants import check_plan, check_state
from zlab.policies.core.journal import Int64Array
from zlab.policies.core.plan import SchedulerLimits, StepOutcome, StepPlan
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import policy_mark
from zlab.traces.schema import EVENT_COLUMNS, EventKind, Phase
from zlab.traces.workload import TraceRequest

MOST_PLANS = 200_000  # a run beyond is taken for a live-lock


@dataclass(frozen=True)
class Job:
    """A request and when it arrives; perhaps when it is aborted, fails, or how many tokens it has
    when it stops.
    """

    request: TraceRequest
    arrival_ns: int = 0
    abort_ns: int | None = None
    fail_ns: int | None = None
    stop_after: int | None = None


@dataclass(frozen=True)
class Case:
    """Everything a run depends on."""

    policy: Policy
    limits: SchedulerLimits
    jobs: tuple[Job, ...]
    prefix_block_size: int | None = None
    step_ns: int = 1000  # of any step
    decode_ns: int = 0  # more for each decode
    prefill_ns: int = 0  # more for each prefill token
    copy_ns: int = 0  # what a compression takes (counts with join `when_done`)
    changes: tuple[
        tuple[int, Policy], ...
    ] = ()  # step before which another policy takes over; in order


@dataclass
class Run:
    """What a driver noted."""

    case: Case
    scheduler: Scheduler
    requests: list[Request] = field(default_factory=list)  # by job
    rows: list[tuple[int, ...]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    causes: list[tuple[int, ...]] = field(default_factory=list)
    digest: str = ""
    plans: int = 0
    token_ns: dict[int, list[int]] = field(
        default_factory=dict
    )  # number -> times of its output tokens (plain driver)
    recomputed: dict[int, int] = field(
        default_factory=dict
    )  # number -> tokens computed once more (plain driver)
    decodes: dict[int, int] = field(default_factory=dict)  # step -> decodes, of planned steps
    stepped_ns: list[int] = field(default_factory=list)  # when each plan was asked for
    now_ns: int = 0

    def of(self, *kinds: EventKind) -> list[tuple[int, ...]]:
        """Rows (step, kind, request, value, num_blocks) of these kinds."""
        return [row for row in self.rows if row[1] in kinds]

    def with_blocks(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Each row with the blocks it names."""
        at = 0
        for row in self.rows:
            yield row, self.blocks[at : at + row[4]]
            at += row[4]


class Driver:
    """Carries a case out; `fast` takes quiet stretches at once, `checked` audits every step and
    shadows all content.
    """

    def __init__(
        self, case: Case, fast: bool = False, checked: bool = True, index: PrefixIndex | None = None
    ) -> None:
        self.case, self.fast, self.checked = case, fast, checked
        self.scheduler = Scheduler(
            case.policy, case.limits, self._sink, index, case.prefix_block_size
        )
        self.run_ = Run(case, self.scheduler)
        self.shadow = Shadow(case.limits, self.scheduler) if checked and not fast else None
        self.now = 0
        self._mail: list[
            tuple[int, int, str, int]
        ] = []  # (time, order, what, job or request number)
        self._order = 0
        self._changes = list(case.changes)
        self._computed: dict[
            int, int
        ] = {}  # number -> text positions whose keys and values were ever computed
        self._by_job: dict[int, Request] = {}
        for number, job in enumerate(case.jobs):
            self._post(job.arrival_ns, "arrive", number)
            if job.abort_ns is not None:
                self._post(max(job.abort_ns, job.arrival_ns), "abort", number)
        self._fails = sorted(
            (max(job.fail_ns, job.arrival_ns), number)
            for number, job in enumerate(case.jobs)
            if job.fail_ns is not None
        )

    def run(self) -> Run:
        """Run until nothing is left to do."""
        for _ in range(MOST_PLANS):
            self._change()
            self._deliver()
            self.run_.stepped_ns.append(self.now)
            plan = self.scheduler.plan(self.now)
            if plan is None:
                self._audit()
                if not self._mail:
                    break
                self.now = max(self.now, self._mail[0][0])
                continue
            self._carry_out(plan)
            if self.fast:
                self._stretch()
        else:
            raise AssertionError(f"after {MOST_PLANS} plans there is still work: a live-lock")
        run = self.run_
        run.requests = [self._by_job[number] for number in sorted(self._by_job)]
        run.now_ns = self.now
        run.digest = self.scheduler.digest()
        return run

    # one step

    def _carry_out(self, plan: StepPlan) -> None:
        run, scheduler = self.run_, self.scheduler
        run.plans += 1
        run.decodes[plan.step] = plan.num_decodes
        if self.checked:
            check_plan(scheduler, plan)
        if self.shadow is not None:
            self.shadow.planned(plan)
        if self.scheduler.state.policy.compression.join is Join.WHEN_DONE:
            for task in plan.compressions:
                self._post(self.now + self.case.copy_ns, "copied", task.request.number)
        stopped = self._stopping(plan)
        tokens = [] if self.fast else self._producing(plan)
        if self.shadow is not None:
            self.shadow.ran(plan)
        self.now += self._cost(plan)
        failed = {}
        while self._fails and self._fails[0][0] <= self.now:
            number = self._fails.pop(0)[1]
            if number in self._by_job:
                failed[self._by_job[number].number] = "planted"
        scheduler.commit(plan, self.now, StepOutcome(stopped=stopped, failed=failed))
        for number in tokens:
            run.token_ns.setdefault(number, []).append(self.now)
        self._audit()

    def _cost(self, plan: StepPlan) -> int:
        case = self.case
        return (
            case.step_ns
            + case.decode_ns * plan.num_decodes
            + case.prefill_ns * plan.num_prefill_tokens
        )

    def _decoders(self, plan: StepPlan) -> list[Request]:
        if not plan.num_decodes:
            return []
        return [request for request in self.scheduler.live() if request.phase is Phase.DECODE]

    def _producing(self, plan: StepPlan) -> list[int]:
        """Requests that get an output token in this step; notes what is computed, and what once
        more.
        """
        computed, again = self._computed, self.run_.recomputed
        for chunk in plan.prefills:
            number, end = chunk.request.number, chunk.start + chunk.count
            again[number] = again.get(number, 0) + max(
                0, min(end, computed.get(number, 0)) - chunk.start
            )
            computed[number] = max(end, computed.get(number, 0))
        decoders = self._decoders(plan)
        for request in decoders:
            tokens = request.prompt_tokens + self.scheduler.state.decoding.tokens(request)[1]
            computed[request.number] = max(tokens, computed.get(request.number, 0))
        last = [
            chunk.request.number
            for chunk in plan.prefills
            if chunk.last and chunk.request.target_tokens > 0
        ]
        return [request.number for request in decoders] + last

    def _stopping(self, plan: StepPlan) -> list[int]:
        """Requests whose token of this step ends them."""
        found = []
        by_number = {
            self._by_job[job].number: self.case.jobs[job].stop_after for job in self._by_job
        }
        last = [
            chunk.request
            for chunk in plan.prefills
            if chunk.last and chunk.request.target_tokens > 0
        ]
        for request in (*self._decoders(plan), *last):
            stop = by_number[request.number]
            if stop is not None and self.scheduler.state.decoding.tokens(request)[1] + 1 >= stop:
                found.append(request.number)
        return found

    def _stretch(self) -> None:
        """Take the steps up to the first in which something is heard from outside."""
        scheduler, case = self.scheduler, self.case
        most = scheduler.uneventful_steps()
        decoding = scheduler.state.decoding
        cost = case.step_ns + case.decode_ns * decoding.num_requests
        if self._mail:  # steps that start before it comes
            most = min(most, -(-(self._mail[0][0] - self.now) // cost))
        if self._fails:  # steps that end before it comes
            most = min(most, (self._fails[0][0] - self.now - 1) // cost)
        if self._changes:
            most = min(most, self._changes[0][0] - scheduler.next_step)
        for number, request in self._by_job.items():
            stop = case.jobs[number].stop_after
            if stop is not None and request.phase is Phase.DECODE:
                most = min(most, stop - decoding.tokens(request)[1] - 1)
        if most > 0:
            self.now += cost * len(scheduler.fast_forward(most))
            self._audit()

    # to and from the outside

    def _post(self, time: int, what: str, number: int) -> None:
        heappush(self._mail, (time, self._order, what, number))
        self._order += 1

    def _change(self) -> None:
        """Policies whose time has come take over, before whoever arrives now."""
        while self._changes and self._changes[0][0] <= self.scheduler.next_step:
            _, policy = self._changes.pop(0)
            self.scheduler.replace_policy(policy, self.now, policy_mark(policy))
            self._audit()

    def _deliver(self) -> None:
        while self._mail and self._mail[0][0] <= self.now:
            _, _, what, number = heappop(self._mail)
            if what == "arrive":
                job = self.case.jobs[number]
                self._by_job[number] = self.scheduler.submit(job.request, self.now, job.arrival_ns)
            elif what == "copied":
                self.scheduler.finished_compressions([number])
            elif self._by_job[number].finish_ns < 0 and not self._by_job[number].to_abort:
                self.scheduler.abort(self._by_job[number].id, self.now)

    def _audit(self) -> None:
        if self.checked:
            check_state(self.scheduler)

    def _sink(self, rows: Int64Array, blocks: Int64Array) -> None:
        assert rows.shape[1] == len(EVENT_COLUMNS)
        self.run_.rows += [tuple(row) for row in rows.tolist()]
        self.run_.blocks += blocks.tolist()
        self.run_.causes += [tuple(row) for row in self.scheduler.take_causes().tolist()]


def drive(
    case: Case, fast: bool = False, checked: bool = True, index: PrefixIndex | None = None
) -> Run:
    """Carry a case out and return what happened."""
    return Driver(case, fast, checked, index).run()


def job(
    id: str,
    prompt: int = 0,
    output: int | None = None,
    arrival_ns: int = 0,
    ids: tuple[int, ...] | None = None,
    **more: object,
) -> Job:
    """A job in one line: `prompt` tokens (or `ids`), `output` tokens; other names are fields of Job
    or TraceRequest.
    """
    outer = {name: more.pop(name) for name in ("abort_ns", "fail_ns", "stop_after") if name in more}
    request = TraceRequest(id, len(ids) if ids is not None else prompt, output, prompt_ids=ids)
    request = replace(request, **{"max_tokens": output, **more})  # type: ignore[arg-type]
    return Job(request, arrival_ns, **outer)  # type: ignore[arg-type]
