"""The laws of the scheduler over random workloads, pools, limits and policies (the ninth comes with the engine)."""

import os
import subprocess
import sys
from dataclasses import replace

from hypothesis import given, settings

from policies.core.limits import Limits
from policies.spec import load_policy, presets
from tests.policies import laws
from tests.policies.cases import cases, preset
from tests.policies.drive import Case, Run, drive, job

EXAMPLES = 120


def all_laws(run: Run, disturbed: bool) -> None:
    """Every law that one run can show."""
    laws.conservation(run)
    laws.one_terminal_event(run)
    if not disturbed:
        laws.liveness(run)
    laws.refused_at_the_door(run)
    laws.bounded_preemptions(run)
    laws.nobody_gives_way_for_nothing(run)
    laws.no_admission_with_preemption(run)
    laws.recomputed_counted(run)
    laws.time_monotone(run)
    laws.times_add_up(run)
    laws.order_kept(run)


@settings(max_examples=2 * EXAMPLES)
@given(cases(disturbed=False))
def test_laws_hold_and_quiet_stretches_change_nothing(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(cases())
def test_laws_hold_with_aborts_failures_and_early_stops(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=True)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(cases(presets_only=True, disturbed=False))
def test_laws_hold_for_every_preset(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=30)
@given(cases())
def test_same_calls_same_digest(case: Case) -> None:
    laws.same_decisions(drive(case, checked=False), drive(case, checked=False))


@settings(max_examples=30)
@given(cases())
def test_looking_changes_nothing(case: Case) -> None:
    """Law 6, the no-op: extra plans when there is nothing to do, audits and digests leave decisions as they are."""
    run = drive(case)
    seen = run.scheduler.digest()
    assert run.scheduler.plan(run.now_ns) is None
    assert run.scheduler.plan(run.now_ns + 5) is None
    assert run.scheduler.quiet_steps() == 0
    assert run.scheduler.digest() == seen


def crowded(name: str) -> Case:
    """A case in which every part of a preset has work to do: shared prefixes, preemption, compression, aborts."""
    limits = Limits(num_blocks=14, block_size=4, max_batched_tokens=24, max_running=16, max_model_len=400)
    jobs = [
        job(f"r{n}", 0, 20 + n % 7, arrival_ns=700 * (n // 4), ids=tuple(range(5 + n % 6)), session=f"s{n % 3}")
        for n in range(24)
    ]
    jobs[5] = replace(jobs[5], abort_ns=30_000)
    jobs[9] = replace(jobs[9], fail_ns=40_000)
    return Case(preset(name, limits), limits, tuple(jobs), decode_ns=3)


def digests() -> str:
    """Digest of the crowded case under every preset, plain and fast; a line each."""
    found = []
    for name in presets():
        plain, fast = drive(crowded(name)), drive(crowded(name), fast=True)
        assert plain.digest == fast.digest
        found.append(f"{name} {plain.digest}")
    return "\n".join(found)


def test_digest_does_not_depend_on_hash_randomisation() -> None:
    """Law 8. Strings as sessions, classes and ids are hashed differently in each of these processes."""
    answers = set()
    for seed in ("0", "1", "4242"):
        code = "from tests.policies.test_laws import digests; print(digests())"
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    assert answers == {digests() + "\n"}


def test_the_crowded_case_is_crowded() -> None:
    """So that the digests above are of something: preemptions, compressions, hits and both kinds of early end occur."""
    hybrid, full = drive(crowded("hybrid")), drive(crowded("full-kv"))
    assert sum(request.compressions for request in hybrid.requests) > 10
    assert sum(request.preemptions for request in full.requests) > 3
    assert sum(request.hit_tokens for request in hybrid.requests) > 20
    assert {request.status.name for request in full.requests} == {"FINISHED", "ABORTED", "FAILED"}


def test_every_preset_loads() -> None:
    assert {load_policy(name).name for name in presets()} == set(presets())
