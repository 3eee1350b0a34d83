"""The small inputs of ../shared/cases that broke other engines, about blocks: shared, freed, held, cached."""

from dataclasses import replace

import pytest

from policies.core.events import Kind
from policies.core.policy import Join
from policies.core.prefix import PrefixIndex
from policies.core.request import Status
from policies.prefix import FullBlocks
from tests.policies import laws
from tests.policies.drive import Driver, drive
from tests.policies.shared_cases import STEP_NS, case, lawful, named
from tests.shared import needs_shared

pytestmark = needs_shared


def test_b12_a_whole_cached_prompt_computes_its_last_token_in_a_block_of_its_own() -> None:
    for preset in ("full-kv", "nano-vllm", "hybrid"):
        run = lawful(case("B12", preset))  # the audit sees every write to a shared block
        second = named(run)["B"]
        assert second.hit_tokens == 4
        rows = [(Kind(kind), value, num) for _, kind, number, value, num in run.rows if number == second.number]
        assert (Kind.HIT, 4, 1) in rows
        assert (Kind.TOOK, 0, 1) in rows
        assert (Kind.CHUNK, 4, 0) in rows


def test_b12_the_last_token_alone_when_the_prompt_is_one_longer() -> None:
    base = case("B12")
    jobs = tuple(
        replace(one, request=replace(one.request, prompt_ids=(*range(1, 10),), prompt_tokens=9)) for one in base.jobs
    )
    second = named(lawful(replace(base, jobs=jobs)))["B"]
    assert second.hit_tokens == 8


def test_b15_colliding_hashes_serve_nobody_elses_blocks() -> None:
    of = case("B15")
    jobs = (*of.jobs, replace(of.jobs[0], request=replace(of.jobs[0].request, id="C"), arrival_ns=2 * 10**9))
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
        sharer = replace(base.jobs[1], request=replace(base.jobs[1].request, output_tokens=output, max_tokens=output))
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
        assert all(scheduler.state.pool.refs[block] for block in used), "held: the copy still reads and writes them"
        assert task.request.in_flight
    if join is Join.WHEN_DONE:
        scheduler.plan(now)
        assert all(scheduler.state.pool.refs[block] for block in used), "not reported as finished: still held"
        scheduler.finished_compressing([task.request.number])
    other = next(iter(set(scheduler.live()) - {task.request}))
    scheduler.plan(now)
    mine = set(other.table)
    assert not [block for block in used - mine if scheduler.state.pool.refs[block]], "all of them are free now"
    assert task.request.status is Status.ABORTED
    assert scheduler.state.pool.num_used == len(mine)


def test_b24_the_only_user_of_a_prefix_leaves_it_to_the_cache() -> None:
    kept = lawful(case("B24"))
    assert named(kept)["A"].compressions > 0
    assert named(kept)["B"].hit_tokens == 8
    assert not kept.of(Kind.PREFIX_LOST)
    base = case("B24")
    lost = lawful(replace(base, policy=replace(base.policy, prefix=FullBlocks(keep=False))))
    assert named(lost)["B"].hit_tokens == 0
    assert [row[3] for row in lost.of(Kind.PREFIX_LOST)] == [2]


def test_b24_without_room_the_prefix_is_given_up_and_counted() -> None:
    base = case("B24")
    tight = replace(base, limits=replace(base.limits, num_blocks=3))
    run = lawful(replace(tight, jobs=base.jobs[:1]))
    assert [row[3] for row in run.of(Kind.PREFIX_LOST)] == [2]
