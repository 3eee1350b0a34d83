"""The stream of causes: each decision against a request, with the resource that was short.

Rows are (step, at_end, request, verdict, cause, needed, available, total, other).
"""

from dataclasses import replace

import pytest

from tests.policies.cases import LIMITS, growing
from tests.policies.drive import Case, drive, job
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.spec import load_policy
from zlab.traces.schema import CAUSE_COLUMNS, Cause, Verdict

NOT_ADMITTED, NO_SLOT, NO_BLOCK, PREEMPTED = (
    Verdict.NOT_ADMITTED,
    Verdict.NO_SLOT,
    Verdict.NO_BLOCK,
    Verdict.PREEMPTED,
)


def case(spec: str, *jobs: tuple[int, int], **limits: int) -> Case:
    """Jobs (prompt tokens, output tokens) that arrive together, on 8 blocks of 4 tokens."""
    sizes = replace(
        LIMITS, **{"num_blocks": 8, "block_size": 4, "max_batched_tokens": 64, **limits}
    )
    asked = tuple(job(f"r{number}", *tokens) for number, tokens in enumerate(jobs))
    return Case(load_policy(spec), sizes, asked)


def test_the_head_of_the_queue_says_how_many_blocks_it_needs() -> None:
    """r0 takes 5 of 8 blocks and grows to 7; r1 needs 4 and waits behind it."""
    run = drive(case("full-kv", (18, 8), (14, 2)))
    assert run.causes == [(0, 0, 1, NOT_ADMITTED, Cause.BLOCKS, 4, 3, 8, 1)]


def test_a_reason_is_written_again_only_when_it_changes() -> None:
    """r2 waits for a place first, then, when r0 has left, for blocks."""
    run = drive(case("full-kv", (4, 3), (18, 12), (14, 2), max_running=2))
    assert [row[2:5] for row in run.causes] == [
        (2, NOT_ADMITTED, Cause.RUNNING),
        (2, NOT_ADMITTED, Cause.BLOCKS),
    ]
    first, then = run.causes
    assert first[0] == 0
    assert first[5:] == (1, 0, 2, 2)
    assert then[0] > first[0]
    assert then[5] == 4 > then[6]


def test_a_preemption_names_the_request_that_needed_the_block() -> None:
    run = drive(growing())
    preempted = [row for row in run.causes if row[3] == PREEMPTED]
    assert preempted, "the case has preemptions"
    for step, _, victim, _, cause, needed, available, total, other in preempted:
        assert (cause, needed, available) == (Cause.BLOCKS, 1, 0)
        assert total == run.case.limits.num_blocks
        grew = [row for row in run.rows if row[0] == step and row[2] == other]
        assert other == victim or grew


def test_a_request_without_a_slot_says_how_many_slots_there_are() -> None:
    spec = "hybrid:budget.blocks=3,budget.tokens=0,window=2,num_slots=1"
    run = drive(case(spec, (4, 12), (4, 12)))
    (stall,) = [row for row in run.causes if row[3] == NO_SLOT]
    assert stall[2] == 1
    assert stall[4:] == (Cause.SLOTS, 1, 0, 1, -1)


@pytest.mark.parametrize("spec", ["full-kv", "full-kv:batching=prefill-first"])
def test_taking_uneventful_steps_at_once_gives_the_same_rows(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When r0 ends, r2 is still refused, now for blocks. The fast driver finds that before a
    stretch of steps that only decode.
    """
    explained = []
    real = Scheduler._explain

    def noted(self: Scheduler, grown: bool) -> None:
        explained.append(self.next_step)
        real(self, grown)

    monkeypatch.setattr(Scheduler, "_explain", noted)
    crowded = case(spec, (4, 3), (16, 12), (14, 2), max_running=2)
    run, fast = drive(crowded), drive(crowded, fast=True)
    assert [row[4] for row in run.causes] == [Cause.RUNNING, Cause.BLOCKS]
    assert fast.causes == run.causes
    assert fast.digest == run.digest
    assert explained, "no refusal was found before a stretch"


def test_nothing_is_collected_where_nothing_listens() -> None:
    deaf = Scheduler(load_policy("full-kv"), case("full-kv").limits)
    heard = drive(case("full-kv", (18, 8), (14, 2)))
    for asked in heard.case.jobs:
        deaf.submit(asked.request, 0)
    now = 0
    while (plan := deaf.plan(now)) is not None:
        now += 1
        deaf.commit(plan, now)
    assert deaf.take_causes().shape == (0, len(CAUSE_COLUMNS))
    assert deaf.digest() == heard.digest
