"""What a driver reports or asks for at awkward moments: ends in every phase, late copies, two
faults at once.
"""

from dataclasses import replace

import pytest

from tests.policies import laws
from tests.policies.drive import Case, drive, job
from tests.policies.stage import Stage
from zlab.policies.core.invariants import check_state
from zlab.policies.core.plan import SchedulerLimits, StepOutcome, UnknownRequestError
from zlab.policies.core.policy import Join
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import load_policy
from zlab.traces.schema import EventKind, Phase, Reason, Status
from zlab.traces.workload import TraceRequest

LIMITS = SchedulerLimits(
    num_blocks=9,
    block_size=4,
    max_batched_tokens=8,
    max_running=16,
    max_model_len=200,
    host_blocks=8,
)
POLICIES = (
    "hybrid:budget.tokens=8,window=2,num_slots=1,join=when_done",
    "hybrid:budget.tokens=8,window=2,join=when_done",
    "hybrid:budget.tokens=8,window=2,preemption=latest-first,preemption.comes_back=swap",
    "full-kv:preemption.comes_back=swap,batching=prefill-first",
    "nano-vllm:limit=step",
    "zipage:budget.tokens=8,window=2",
)
EVERY_PHASE = set(Phase) - {Phase.DONE}


def reached(spec: str, phase: Phase) -> tuple[Stage, Request] | None:
    """A house in which some request is in that phase, if the policy ever gets there."""
    few = 2 if phase is Phase.PAUSED else 16
    house = Stage(load_policy(spec), replace(LIMITS, max_running=few))
    for number in range(6):
        house.submit(f"r{number}", 3 + 2 * number, 30)
    pending: list[tuple[int, int]] = []
    for _ in range(150):
        for request in house.scheduler.live():
            if request.phase is phase:
                return house, request
        plan = house.scheduler.plan(house.now)
        if plan is not None:
            pending += [(house.now + 4, task.request.number) for task in plan.compressions]
            house.scheduler.commit(plan, house.now + 1)
        elif not house.scheduler.state.requests:
            return None
        house.now += 1
        house.scheduler.finished_compressions(
            [number for due, number in pending if due == house.now]
        )
    return None


@pytest.mark.parametrize("how", ["abort", "fail"])
@pytest.mark.parametrize("phase", sorted(EVERY_PHASE))
def test_an_end_in_every_phase_gives_everything_back(phase: Phase, how: str) -> None:
    """Case B33: blocks, slot, place and host memory are back at the next step at the latest,
    however it ends.
    """
    found = [there for spec in POLICIES if (there := reached(spec, phase)) is not None]
    assert found, f"no policy ever brings a request to {phase.name}"
    for house, request in found:
        scheduler = house.scheduler
        in_flight = request.in_flight
        if how == "abort":
            scheduler.abort(request.id, house.now)
            with pytest.raises(UnknownRequestError, match=request.id):
                scheduler.abort(request.id, house.now)
        else:
            plan = scheduler.plan(house.now)
            if plan is None or request.phase is not phase:
                continue
            house.now += 1
            in_flight = request.in_flight
            scheduler.commit(
                plan, house.now, StepOutcome(failed={request.number: "the card is on fire"})
            )
        if in_flight:
            assert request.to_abort
            scheduler.finished_compressions([request.number])
            scheduler.plan(house.now)
        wanted = Status.ABORTED if how == "abort" else Status.FAILED
        assert (request.status, request.phase) == (wanted, Phase.DONE)
        assert (request.table, request.slot, request.line, request.swapped_blocks) == (
            [],
            -1,
            -1,
            0,
        )
        assert sum(request.phase_ns) == request.finish_ns - request.arrival_ns
        assert request.message == ("the card is on fire" if how == "fail" else "")
        assert all(other is not request for other in scheduler.live())


def test_a_failure_meets_compressing_and_swapping_requests() -> None:
    """The test above passes over a phase that a plan ends; those with a copy in flight must be
    among those it meets.
    """
    met = set()
    for phase in (Phase.COMPRESSING, Phase.SWAPPED):
        for house, request in filter(None, (reached(spec, phase) for spec in POLICIES)):
            plan = house.scheduler.plan(house.now)
            if plan is not None and request.phase is phase:
                met.add(phase)
    assert met == {Phase.COMPRESSING, Phase.SWAPPED}


def running(count: int, output: int = 5) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(load_policy("full-kv"), replace(LIMITS, max_batched_tokens=64))
    requests = [
        scheduler.submit(TraceRequest(f"r{n}", 3, output, max_tokens=output), 0)
        for n in range(count)
    ]
    return scheduler, requests


def test_two_fail_and_one_stops_in_one_step() -> None:
    scheduler, (first, second, third) = running(3)
    plan = scheduler.plan(0)
    assert plan is not None
    outcome = StepOutcome(
        stopped=[third.number], failed={first.number: "one", second.number: "two"}
    )
    scheduler.commit(plan, 1, outcome)
    assert [request.status for request in (first, second, third)] == [
        Status.FAILED,
        Status.FAILED,
        Status.FINISHED,
    ]
    assert (first.message, second.message, third.reason) == ("one", "two", Reason.STOP)
    assert scheduler.state.pool.num_used == 0
    assert scheduler.plan(1) is None


@pytest.mark.parametrize(
    "length", [1, 2]
)  # the limit is met by a prefill's token, by a decode step's
@pytest.mark.parametrize(
    ("more", "status", "reason"),
    [
        ({}, Status.FINISHED, Reason.LENGTH),
        ({"stopped": [0]}, Status.FINISHED, Reason.STOP),
        ({"failed": {0: "late"}}, Status.FAILED, 0),
        ({"stopped": [0], "failed": {0: "late"}}, Status.FAILED, 0),
    ],
)
def test_a_request_ends_by_its_length_unless_its_last_token_stops_or_its_last_step_failed(
    more: dict[str, object], status: Status, reason: int, length: int
) -> None:
    scheduler, (request,) = running(1, output=length)
    for now, outcome in enumerate((StepOutcome(), StepOutcome(**more))[-length:]):  # type: ignore[arg-type]
        plan = scheduler.plan(now)
        assert plan is not None
        scheduler.commit(plan, now + 1, outcome)
    assert (request.status, request.reason, request.generated) == (status, reason, length)
    assert request.message == ("late" if status is Status.FAILED else "")
    assert scheduler.take_finished() == [request]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_stop_before_the_limit_does_not_hide_a_failure(where: str) -> None:
    """The request stops in the step of its first token or of its second, and its step failed."""
    scheduler, (request, other) = running(2)
    for now in range(1 if where == "before" else 2):
        plan = scheduler.plan(now)
        assert plan is not None
        last = now == (where == "after")
        outcome = (
            StepOutcome(stopped=[request.number], failed={request.number: "late"})
            if last
            else StepOutcome()
        )
        scheduler.commit(plan, now + 1, outcome)
    assert (request.status, request.message) == (Status.FAILED, "late")
    assert other.status is Status.LIVE


def test_a_failure_does_not_rename_an_end_that_is_decided() -> None:
    """It was aborted while its compression was in flight; a failure is reported before the copy is
    over.
    """
    met = 0
    for house, request in filter(None, (reached(spec, Phase.COMPRESSING) for spec in POLICIES)):
        scheduler = house.scheduler
        scheduler.abort(request.id, house.now)
        plan = scheduler.plan(house.now)
        if plan is None or request.number not in scheduler.state.requests:
            continue  # this policy joins at the next step, whatever the copy does
        scheduler.commit(plan, house.now + 1, StepOutcome(failed={request.number: "late"}))
        assert request.to_abort
        scheduler.finished_compressions([request.number])
        scheduler.plan(house.now + 1)
        assert (request.status, request.message) == (Status.ABORTED, "")
        met += 1
    assert met


@pytest.mark.parametrize(
    ("most", "reason"),
    [(None, Reason.STOP), (3, Reason.STOP), (2, Reason.LENGTH), (1, Reason.LENGTH)],
)
def test_a_forced_length_tells_of_a_stop_only_below_the_limit(
    most: int | None, reason: Reason
) -> None:
    scheduler = Scheduler(load_policy("full-kv"), LIMITS)
    request = scheduler.submit(TraceRequest("r", 3, 2, max_tokens=most), 0)
    while (plan := scheduler.plan(0)) is not None:
        scheduler.commit(plan, 0)
    assert (request.status, request.reason) == (Status.FINISHED, reason)


def test_words_about_strangers_are_not_heeded() -> None:
    scheduler, (request,) = running(1)
    plan = scheduler.plan(0)
    assert plan is not None
    scheduler.commit(plan, 1, StepOutcome(stopped=[77], failed={78: "?"}, compressed=[79]))
    scheduler.finished_compressions([80])
    assert request.status is Status.LIVE
    plan = scheduler.plan(1)
    assert plan is not None
    scheduler.commit(plan, 2)
    assert scheduler.uneventful_steps() > 0


def test_time_must_not_run_backwards() -> None:
    scheduler, _ = running(1)
    plan = scheduler.plan(5)
    assert plan is not None
    with pytest.raises(AssertionError, match="time ran backwards: 4 after 5"):
        scheduler.commit(plan, 4)


@pytest.mark.parametrize("copy_ns", [0, 1, 999, 1000, 7_500, 123_456])
def test_copies_that_take_long(copy_ns: int) -> None:
    base = load_policy("hybrid:budget.tokens=8,window=2,join=when_done")
    jobs = tuple(job(f"r{n}", 2 + 3 * n, 25, 300 * n) for n in range(5))
    case = Case(base, LIMITS, jobs, copy_ns=copy_ns)
    run = drive(case)
    laws.liveness(run)
    laws.same_decisions(run, drive(case, fast=True))
    started = {row[2]: row[0] for row in run.of(EventKind.COMPRESSING)}
    assert started
    if copy_ns > 100_000:
        waited = max(request.phase_ns[Phase.COMPRESSING] for request in run.requests)
        assert waited >= copy_ns


@pytest.mark.parametrize("join", list(Join))
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_prompts_that_end_in_around_and_beyond_the_window(window: int, join: Join) -> None:
    """Every prompt length from 1 to 20 tokens, alone and in company, budgets of three blocks of
    four.
    """
    policy = load_policy(f"hybrid:budget.tokens=8,window={window},join={join.value},num_slots=1")
    jobs = tuple(job(f"r{n}", n, 7, 400 * n) for n in range(1, 21))
    for case in (
        Case(policy, replace(LIMITS, num_blocks=14), jobs),
        Case(policy, LIMITS, jobs[::3]),
    ):
        run = drive(case)
        laws.liveness(run)
        laws.bounded_preemptions(run)
        laws.same_decisions(run, drive(case, fast=True))


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_blocks(size: int) -> None:
    policy = load_policy("hybrid:budget.blocks=2,budget.tokens=0,window=1")
    limits = SchedulerLimits(
        num_blocks=5, block_size=size, max_batched_tokens=3, max_running=3, max_model_len=50
    )
    jobs = tuple(job(f"r{n}", 1 + n % 3, 9, 100 * n) for n in range(6))
    run = drive(Case(policy, limits, jobs))
    laws.liveness(run)
    laws.same_decisions(run, drive(run.case, fast=True))


def test_one_at_a_time() -> None:
    for spec in POLICIES:
        limits = replace(LIMITS, max_running=1)
        jobs = tuple(job(f"r{n}", 3 + n, 12, 100 * n) for n in range(5))
        run = drive(Case(load_policy(spec), limits, jobs, copy_ns=2000))
        laws.liveness(run)
        assert max(run.decodes.values()) == 1


def test_twins_that_compute_one_prefix_at_once() -> None:
    """The third shares a block with each twin; when a twin is compressed, the block in the middle
    is not its own.
    """
    policy = load_policy("hybrid:budget.tokens=8,window=2")
    limits = replace(LIMITS, num_blocks=24, max_batched_tokens=12)
    ids = tuple(range(8))
    for late in range(0, 9000, 1000):
        for gap in (0, 1000, 2000):
            jobs = (
                job("a", 0, 9, ids=ids),
                job("b", 0, 9, gap, ids=(*ids, 50)),
                job("c", 0, 9, late, ids=(*ids, 60)),
            )
            run = drive(
                Case(policy, limits, jobs)
            )  # the shadow memory sees a shared block overwritten
            laws.liveness(run)


def test_who_is_paused_goes_on_as_soon_as_a_step_has_a_place() -> None:
    """Two may decode in a step; while one is compressed for long, the third takes its place, quiet
    stretch or not.
    """
    policy = load_policy("zipage:budget.tokens=8,window=2,join=when_done")
    jobs = tuple(job(f"r{n}", 9 - 4 * n, 30) for n in range(3))
    case = Case(policy, replace(LIMITS, max_running=2, max_batched_tokens=64), jobs, copy_ns=20_000)
    run = drive(case)
    laws.same_decisions(run, drive(case, fast=True))
    started = run.of(EventKind.COMPRESSING)[0][0]
    resumed = [row[0] for row in run.of(EventKind.RESUMED) if row[2] == 2]
    assert resumed[0] == started + 1


def test_blocks_that_a_swap_gives_up_go_to_whom_it_gave_way() -> None:
    """Prefill first: without a rule the swapped one is back, in its own blocks, before the needy
    one is asked again.
    """
    policy = load_policy(
        "full-kv:batching=prefill-first,preemption.comes_back=swap,watermark_share=0.0"
    )
    case = Case(
        policy,
        SchedulerLimits(6, 4, 16, 4, 100, host_blocks=20),
        (job("A", 8, 12), job("B", 6, 14)),
    )
    run = drive(case)
    assert [request.preemptions for request in run.requests] == [0, 1]
    out, grew = run.of(EventKind.SWAP_OUT)[0], run.of(EventKind.GREW)
    assert [row[2] for row in grew if row[0] == out[0] + 1] == [0], "A has its block one step later"


def cached_prompt(num: int) -> tuple[Scheduler, list[Request]]:
    """So many finished requests with one prompt of three blocks, and a fourth token block."""
    ids = tuple(range(14))
    limits = replace(LIMITS, num_blocks=20, max_batched_tokens=64)
    scheduler = Scheduler(load_policy("full-kv"), limits)
    requests = []
    for place in range(num):
        asked = TraceRequest(f"r{place}", len(ids), 3, max_tokens=3, prompt_ids=ids)
        requests.append(scheduler.submit(asked, 0))
        while requests[-1].status is Status.LIVE:
            plan = scheduler.plan(0)
            assert plan is not None
            scheduler.commit(plan, 0)
    return scheduler, requests


def test_the_prompt_of_a_damaged_request_is_not_matched_any_more() -> None:
    """It has ended: its blocks lie in the pool and could be matched."""
    scheduler, (first, second) = cached_prompt(2)
    assert second.hit_tokens == 12
    state = scheduler.state
    assert state.pool.num_cached == 3
    scheduler.invalidate(first, "damaged", 0)
    assert (first.status, first.message) == (Status.FINISHED, "")
    assert not state.pool.num_cached
    assert state.index is not None
    assert not state.index.num_entries
    check_state(scheduler)
    third = scheduler.submit(
        TraceRequest("again", 14, 1, max_tokens=1, prompt_ids=tuple(range(14))), 0
    )
    assert scheduler.plan(0) is not None
    assert not third.hit_tokens


def test_a_damaged_request_that_runs_fails_and_the_owners_of_its_blocks_go_on() -> None:
    scheduler, _ = cached_prompt(1)
    asked = TraceRequest("a", 14, 9, max_tokens=9, prompt_ids=tuple(range(14)))
    one, other = scheduler.submit(asked, 0), scheduler.submit(replace(asked, id="b"), 0)
    plan = scheduler.plan(0)
    assert plan is not None
    scheduler.commit(plan, 0)
    assert (one.hit_tokens, other.hit_tokens) == (12, 12)
    scheduler.invalidate(one, "damaged", 0)
    assert (one.status, one.message) == (Status.FAILED, "damaged")
    check_state(scheduler)
    assert not scheduler.state.pool.num_cached
    while other.status is Status.LIVE:
        plan = scheduler.plan(0)
        assert plan is not None
        scheduler.commit(plan, 0)
        check_state(scheduler)
    assert (other.status, other.generated) == (Status.FINISHED, 9)
    assert scheduler.state.pool.num_free == 20
    assert not scheduler.state.pool.num_cached, "what was damaged can be matched again"


def test_parts_of_a_damaged_prompt_are_forgotten_where_its_beginning_is_not_known() -> None:
    """A block is reused as soon as its turn comes, the first of a prompt last."""
    scheduler, (request,) = cached_prompt(1)
    index, pool = scheduler.state.index, scheduler.state.pool
    assert index is not None
    first = next(index.match([request.content[0]]))
    pool.num_cached -= 1
    pool.forget(first.block)
    assert not list(index.match(request.content[place] for place in range(3)))
    scheduler.invalidate(request, "damaged", 0)
    assert (index.num_entries, pool.num_cached) == (0, 0)
