"""The small inputs of ../shared/cases that broke other engines, as far as scheduling is concerned.

The small inputs of ../shared/cases that broke other engines, about blocks: shared, freed, held,
cached.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.policies import laws
from tests.policies.drive import Driver, Job, drive
from tests.policies.shared_cases import STEP_NS, case, job, lawful, named, read
from tests.shared import needs_shared
from zlab.policies.core.block_pool import PrefixIndex
from zlab.policies.core.plan import DuplicateRequestError, SchedulerLimits
from zlab.policies.core.policy import Join
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.options import FullBlocks
from zlab.policies.spec import PolicyError, load_policy, policy_from_toml, presets
from zlab.traces.schema import EventKind, Phase, Reason, Status
from zlab.traces.workload import TraceRequest

pytestmark = needs_shared


@pytest.mark.parametrize("policy", [name for name in presets() if name != "constrained"])
def test_b01_a_prompt_that_never_fits_does_not_freeze_the_queue(policy: str) -> None:
    run = named(lawful(case("B01", policy)))
    assert run["A"].status is Status.REFUSED
    assert run["A"].reason == Reason.NEVER_FITS
    assert "blocks of 4 tokens" in run["A"].message
    assert "the pool has 4" in run["A"].message
    assert run["B"].status is Status.FINISHED


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("policy", list(presets()))
def test_b01b_a_reserve_freezes_nobody(policy: str, share: float) -> None:
    """The watermark holds only while others run: who needs the whole pool gets it alone, so
    capacity is the pool.
    """
    base = case("B01b", policy)
    policy_ = replace(base.policy, admission=replace(base.policy.admission, watermark_share=share))  # type: ignore[type-var]
    run = named(lawful(replace(base, policy=policy_)))
    assert {request.status for request in run.values()} == {Status.FINISHED}
    longer = replace(base.jobs[0], request=replace(base.jobs[0].request, prompt_tokens=17))
    run = named(lawful(replace(base, policy=policy_, jobs=(longer, base.jobs[1]))))
    assert run["A"].status is Status.REFUSED
    assert "it needs 5 blocks" in run["A"].message
    assert "the pool has 4" in run["A"].message
    assert run["B"].status is Status.FINISHED


def test_b02_fits_as_a_prompt_but_not_with_its_output() -> None:
    full = named(lawful(case("B02")))["A"]
    assert full.status is Status.REFUSED
    assert "it needs 6 blocks" in full.message
    assert "15 prompt and 8 output tokens" in full.message
    for preset in ("hybrid", "constrained", "hybrid-adaptive"):
        kept = named(lawful(case("B02", preset)))["A"]  # full with 16 tokens, and again with 12
        assert (kept.status, kept.generated, kept.compressions) == (Status.FINISHED, 8, 2)
        assert kept.preemptions == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 100, None])
def test_b02_at_every_length_around_the_wall(max_tokens: int | None) -> None:
    """15 prompt tokens in 16 positions: two output tokens fit (the last is never written)."""
    base = case("B02")
    asked = replace(base.jobs[0].request, max_tokens=max_tokens, output_tokens=max_tokens)
    request = named(lawful(replace(base, jobs=(Job(asked),))))["A"]
    if max_tokens is None:
        assert (request.status, request.generated, request.reason) == (
            Status.FINISHED,
            2,
            Reason.LENGTH,
        )
    else:
        assert request.status is (Status.FINISHED if max_tokens <= 2 else Status.REFUSED)


def test_b04_no_ping_pong_during_chunked_prefill() -> None:
    of = case("B04")
    run = lawful(of)
    requests = named(run)
    assert requests["L"].preemptions <= 1
    assert requests["R"].preemptions == 0
    times = run.token_ns[requests["R"].number]
    assert all(after - before == STEP_NS for before, after in pairwise(times)), (
        "R decodes in every step"
    )
    admitted = next(
        place
        for place, row in enumerate(run.rows)
        if row[1:3] == (EventKind.ADMITTED, requests["L"].number)
    )
    assert run.rows[admitted + 1][1:] == (EventKind.TOOK, requests["L"].number, 0, 6), (
        "it gets all of its blocks or none"
    )


def test_b06_steady_prefill_does_not_starve_decode() -> None:
    run = lawful(case("B06"))
    times = run.token_ns[named(run)["R"].number]
    assert max(after - before for before, after in pairwise(times)) == STEP_NS


def test_b06_prefill_is_not_starved_either() -> None:
    """As many decodes as a step takes tokens: whoever is admitted still gets its prompt
    computed.
    """
    base = case("B06")
    limits = replace(base.limits, max_batched_tokens=4)
    jobs = tuple(Job(TraceRequest(f"r{n}", 12, 60, max_tokens=60)) for n in range(12))
    run = lawful(replace(base, limits=limits, jobs=jobs))
    waits = [request.first_token_ns - request.first_admitted_ns for request in run.requests]
    assert max(waits) <= 20 * STEP_NS


@pytest.mark.parametrize("back", ["recompute", "swap"])
def test_b08_a_preempted_request_keeps_its_turn(back: str) -> None:
    base = case("B08")
    policy = load_policy(f"full-kv:preemption.comes_back={back}")
    run = lawful(replace(base, policy=policy, limits=replace(base.limits, host_blocks=10)))
    assert sum(request.preemptions for request in run.requests) > 0
    again = [row[2] for row in run.of(EventKind.ADMITTED, EventKind.SWAP_IN)]
    assert again.index(1, again.index(1) + 1) < again.index(2), (
        "B is back before C is admitted at all"
    )


def test_b10_a_request_that_compresses_hides_nobody() -> None:
    base = case("B10")
    for join in Join:
        answer = replace(base.policy.compression, join=join)  # type: ignore[type-var]
        run = lawful(
            replace(base, policy=replace(base.policy, compression=answer), copy_ns=5 * STEP_NS)
        )
        assert {request.status for request in run.requests} == {Status.FINISHED}
        assert named(run)["A"].compressions > 0


def test_b10_while_one_compresses_long_the_others_decode() -> None:
    base = case("B10")
    answer = replace(base.policy.compression, join=Join.WHEN_DONE)  # type: ignore[type-var]
    lengths = zip(base.jobs, (8, 1), strict=False)
    only = tuple(
        replace(one, request=replace(one.request, prompt_tokens=length)) for one, length in lengths
    )
    run = drive(
        replace(
            base, policy=replace(base.policy, compression=answer), copy_ns=40 * STEP_NS, jobs=only
        )
    )
    first = run.of(EventKind.COMPRESSING)[0]
    other = run.requests[1 - first[2]]
    joined = next(row[0] for row in run.of(EventKind.COMPRESSED) if row[2] == first[2])
    meanwhile = [step for step in range(first[0], joined) if run.decodes.get(step)]
    assert len(meanwhile) >= 4, f"{other.id} goes on while the other is compressed"


def test_b28_no_output_wanted() -> None:
    run = lawful(case("B28"))
    zero, negative = named(run)["Z"], named(run)["N"]
    assert (zero.status, zero.reason, zero.generated) == (Status.FINISHED, Reason.LENGTH, 0)
    assert zero.first_token_ns == -1
    assert negative.status is Status.REFUSED
    assert negative.reason == Reason.BAD_MAX_TOKENS
    assert "-1" in negative.message


@pytest.mark.parametrize("policy", list(presets()))
def test_b28_a_prefill_without_output_leaves_its_prefix(policy: str) -> None:
    base = case("B28", policy)
    ids = tuple(range(9))
    asked = [TraceRequest(f"z{n}", 9, 0, max_tokens=0, prompt_ids=ids) for n in range(2)]
    run = lawful(replace(base, jobs=(Job(asked[0]), Job(asked[1], 5 * STEP_NS))))
    assert run.requests[1].hit_tokens == 8
    assert {request.reason for request in run.requests} == {Reason.LENGTH}


def test_b29_an_id_twice() -> None:
    row = read("B29")
    asked = [job(item).request for item in row["requests"]]
    scheduler = Scheduler(
        load_policy("full-kv"), SchedulerLimits(row["pool_blocks"], row["block_size"])
    )
    first = scheduler.submit(asked[0], 0)
    with pytest.raises(DuplicateRequestError, match="'x'"):
        scheduler.submit(asked[1], 0)
    now = 0
    while (plan := scheduler.plan(now)) is not None:
        now += STEP_NS
        scheduler.commit(plan, now)
    assert first.status is Status.FINISHED
    second = scheduler.submit(asked[1], now)
    assert second.number != first.number
    assert second.status is Status.LIVE


def test_b29_an_aborted_id_is_free_at_once_and_means_the_new_one() -> None:
    """While the old request's copy is still in flight, nothing that happens to it may touch the new
    one.
    """
    base = case("B20")
    scheduler = Scheduler(base.policy, base.limits)
    for one in base.jobs:
        scheduler.submit(one.request, 0)
    now = 0
    while not (plan := scheduler.plan(now)).compressions:  # type: ignore[union-attr]
        now += STEP_NS
        scheduler.commit(plan, now)  # type: ignore[arg-type]
    assert plan is not None
    old = plan.compressions[0].request
    scheduler.commit(plan, now)
    scheduler.abort(old.id, now)
    new = scheduler.submit(replace(base.jobs[0].request, id=old.id), now)
    assert old.to_abort
    scheduler._end(old, Status.FAILED, "its copy failed, too")
    assert old.status is Status.ABORTED, "its end was decided before"
    assert scheduler.abort(old.id, now) is new
    scheduler.plan(now)
    assert (old.status, new.status) == (Status.ABORTED, Status.ABORTED)


@pytest.mark.parametrize("policy", list(presets()))
def test_b27_an_empty_prompt_is_refused_and_the_others_run(policy: str) -> None:
    run = named(lawful(case("B27", policy)))
    assert run["E"].status is Status.REFUSED
    assert run["E"].reason == Reason.EMPTY_PROMPT
    assert run["B"].status is Status.FINISHED


@pytest.mark.parametrize("back", ["recompute", "swap"])
def test_b36_the_first_token_is_the_one_the_user_saw(back: str) -> None:
    base = case("B36")
    policy = load_policy(f"full-kv:preemption.comes_back={back}")
    of = replace(
        base,
        policy=policy,
        limits=replace(base.limits, host_blocks=10),
        decode_ns=17,
        prefill_ns=91,
    )
    run = lawful(of)
    victim = max(run.requests, key=lambda request: request.preemptions)
    assert victim.preemptions > 0
    assert victim.first_token_ns == run.token_ns[victim.number][0]
    assert victim.phase_ns[Phase.SWAPPED if back == "swap" else Phase.PREEMPTED] > 0
    assert sum(victim.phase_ns) == victim.finish_ns - victim.arrival_ns


def test_b43_an_unknown_option_is_an_error_that_names_the_nearest() -> None:
    wrong = "redundncy_lambda = 0.2"
    assert wrong in read("B43")["do"]
    text = presets()["hybrid"].replace(
        'compression = "by-score"', f'compression = {{ kind = "by-score", {wrong} }}'
    )
    assert wrong in text
    nearest = (
        r"'redundncy_lambda'; did you mean 'redundancy_lambda'\? \(choices: .*redundancy_lambda.*\)"
    )
    with pytest.raises(PolicyError, match=nearest):
        policy_from_toml(text)
    with pytest.raises(PolicyError, match=nearest):
        load_policy("hybrid:redundncy_lambda=0.2")
    with pytest.raises(PolicyError, match=nearest):
        load_policy("hybrid:compression.redundncy_lambda=0.2")
    with pytest.raises(PolicyError, match="'prefixx'; did you mean 'prefix'"):
        policy_from_toml(presets()["hybrid"].replace("prefix =", "prefixx ="))


def test_b12_a_whole_cached_prompt_computes_its_last_token_in_a_block_of_its_own() -> None:
    for preset in ("full-kv", "nano-vllm", "hybrid"):
        run = lawful(case("B12", preset))  # the audit sees every write to a shared block
        second = named(run)["B"]
        assert second.hit_tokens == 4
        rows = [
            (EventKind(kind), value, num)
            for _, kind, number, value, num in run.rows
            if number == second.number
        ]
        assert (EventKind.HIT, 4, 1) in rows
        assert (EventKind.TOOK, 0, 1) in rows
        assert (EventKind.CHUNK, 4, 0) in rows


def test_b12_the_last_token_alone_when_the_prompt_is_one_longer() -> None:
    base = case("B12")
    jobs = tuple(
        replace(one, request=replace(one.request, prompt_ids=(*range(1, 10),), prompt_tokens=9))
        for one in base.jobs
    )
    second = named(lawful(replace(base, jobs=jobs)))["B"]
    assert second.hit_tokens == 8


def test_b15_colliding_hashes_serve_nobody_elses_blocks() -> None:
    of = case("B15")
    jobs = (
        *of.jobs,
        replace(of.jobs[0], request=replace(of.jobs[0].request, id="C"), arrival_ns=2 * 10**9),
    )
    of = replace(of, jobs=jobs)
    collides = drive(of, index=PrefixIndex(block_hash=lambda parent, content, salt: 7))
    laws.same_decisions(collides, drive(of))
    hits = {request.id: request.hit_tokens for request in collides.requests}
    assert hits == {"A": 0, "B": 0, "C": 4}


def test_b18_no_block_is_freed_twice() -> None:
    run = lawful(case("B18"))
    sharer, compressed = named(run)["B"], named(run)["A"]
    assert sharer.hit_tokens == 8
    assert compressed.compressions > 0
    pool = run.scheduler.state.pool
    with pytest.raises(AssertionError, match="block 3 has no owner"):
        pool.release(3)
    with pytest.raises(AssertionError, match="block 3 has 0 owners"):
        pool.release_private([3])


@pytest.mark.parametrize("keep", [True, False])
def test_b18_a_sharer_ends_while_the_other_compresses(keep: bool) -> None:
    """The copy takes long; the shared blocks are read to its end and then given up once."""
    base = case("B18")
    answer = replace(base.policy.compression, join=Join.WHEN_DONE)  # type: ignore[type-var]
    policy = replace(base.policy, compression=answer, prefix=FullBlocks(keep))
    for output in range(1, 12):
        sharer = replace(
            base.jobs[1],
            request=replace(base.jobs[1].request, output_tokens=output, max_tokens=output),
        )
        run = lawful(replace(base, policy=policy, jobs=(base.jobs[0], sharer), copy_ns=3 * STEP_NS))
        assert named(run)["A"].generated == 20


@pytest.mark.parametrize("join", list(Join))
def test_b20_an_abort_holds_the_blocks_until_the_copy_is_over(join: Join) -> None:
    base = case("B20")
    answer = replace(base.policy.compression, join=join)  # type: ignore[type-var]
    policy = replace(base.policy, compression=answer)
    driver = Driver(replace(base, policy=policy, copy_ns=4 * STEP_NS))
    scheduler, now = driver.scheduler, 0
    for one in base.jobs:
        scheduler.submit(one.request, 0)
    while not (plan := scheduler.plan(now)).compressions:  # type: ignore[union-attr]
        now += STEP_NS
        scheduler.commit(plan, now)  # type: ignore[arg-type]
    assert plan is not None
    task = plan.compressions[0]
    used = {*task.sources, *task.targets}
    scheduler.commit(plan, now)
    scheduler.abort(task.request.id, now)
    if join is not Join.BLOCKING:
        assert all(scheduler.state.pool.refs[block] for block in used), (
            "held: the copy still reads and writes them"
        )
        assert task.request.in_flight
    if join is Join.WHEN_DONE:
        scheduler.plan(now)
        assert all(scheduler.state.pool.refs[block] for block in used), (
            "not reported as finished: still held"
        )
        scheduler.finished_compressions([task.request.number])
    other = next(iter(set(scheduler.live()) - {task.request}))
    scheduler.plan(now)
    mine = set(other.table)
    assert not [block for block in used - mine if scheduler.state.pool.refs[block]], (
        "all of them are free now"
    )
    assert task.request.status is Status.ABORTED
    assert scheduler.state.pool.num_used == len(mine)


def test_b24_the_only_user_of_a_prefix_leaves_it_to_the_cache() -> None:
    kept = lawful(case("B24"))
    assert named(kept)["A"].compressions > 0
    assert named(kept)["B"].hit_tokens == 8
    assert not kept.of(EventKind.PREFIX_LOST)
    base = case("B24")
    lost = lawful(replace(base, policy=replace(base.policy, prefix=FullBlocks(keep=False))))
    assert named(lost)["B"].hit_tokens == 0
    assert [row[3] for row in lost.of(EventKind.PREFIX_LOST)] == [2]


def test_b24_without_room_the_prefix_is_given_up_and_counted() -> None:
    base = case("B24")
    tight = replace(base, limits=replace(base.limits, num_blocks=3))
    run = lawful(replace(tight, jobs=base.jobs[:1]))
    assert [row[3] for row in run.of(EventKind.PREFIX_LOST)] == [2]
