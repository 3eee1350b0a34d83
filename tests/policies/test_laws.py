import os

from hypothesis import given, settings

from policies.core.request import Status
from tests.policies.cases import cases
from tests.policies.drive import Case, drive

N = int(os.environ.get("N", "100"))


@settings(max_examples=N)
@given(cases())
def test_fast_equals_plain(case: Case) -> None:
    plain, fast = drive(case), drive(case, fast=True)
    assert plain.rows == fast.rows
    assert plain.blocks == fast.blocks
    assert plain.digest == fast.digest
    for one, other in zip(plain.requests, fast.requests, strict=True):
        for name in (
            "phase_ns",
            "finish_ns",
            "first_token_ns",
            "first_admitted_ns",
            "hit_tokens",
            "recomputed_tokens",
            "preemptions",
            "swaps",
            "compressions",
            "generated",
            "status",
            "reason",
            "message",
        ):
            assert getattr(one, name) == getattr(other, name), (one.id, name)


@settings(max_examples=N)
@given(cases(disturbed=False))
def test_liveness(case: Case) -> None:
    run = drive(case)
    for r in run.requests:
        assert r.status in (Status.FINISHED, Status.REFUSED)
    pool = run.scheduler.state.pool
    assert pool.num_free == pool.num_blocks
