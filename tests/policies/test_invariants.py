"""Each law is seen to fail on a fault planted into the core: a check that cannot fail holds
nothing.

The laws of the scheduler over random workloads, pools, limits and policies (the ninth comes with
the engine).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from tests.policies import drive as driver
from tests.policies import laws, planted
from tests.policies.cases import SCENARIOS, cases, preset
from tests.policies.drive import Case, Run, drive, job
from zlab.policies.core.plan import SchedulerLimits, StuckError
from zlab.policies.spec import load_policy, presets

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
    """Law 6, the no-op: extra plans when there is nothing to do, audits and digests leave decisions
    as they are.
    """
    run = drive(case)
    seen = run.scheduler.digest()
    assert run.scheduler.plan(run.now_ns) is None
    assert run.scheduler.plan(run.now_ns + 5) is None
    assert run.scheduler.uneventful_steps() == 0
    assert run.scheduler.digest() == seen


def crowded(name: str) -> Case:
    """A case in which every part of a preset has work to do: shared prefixes, preemption,
    compression, aborts.
    """
    limits = SchedulerLimits(
        num_blocks=14, block_size=4, max_batched_tokens=24, max_running=16, max_model_len=400
    )
    jobs = [
        job(
            f"r{n}",
            0,
            20 + n % 7,
            arrival_ns=700 * (n // 4),
            ids=tuple(range(5 + n % 6)),
            session=f"s{n % 3}",
        )
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
    """Law 8. Strings as sessions, classes and ids are hashed differently in each of these
    processes.
    """
    answers = set()
    for seed in ("0", "1", "4242"):
        code = "from tests.policies.test_invariants import digests; print(digests())"
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        answers.add(done.stdout)
    assert answers == {digests() + "\n"}


def test_the_crowded_case_is_crowded() -> None:
    """So that the digests above are of something: preemptions, compressions, hits and both kinds of
    early end occur.
    """
    hybrid, full = drive(crowded("hybrid")), drive(crowded("full-kv"))
    assert sum(request.compressions for request in hybrid.requests) > 10
    assert sum(request.preemptions for request in full.requests) > 3
    assert sum(request.hit_tokens for request in hybrid.requests) > 20
    assert {request.status.name for request in full.requests} == {"FINISHED", "ABORTED", "FAILED"}


def test_every_preset_loads() -> None:
    assert {load_policy(name).name for name in presets()} == set(presets())


Patch = pytest.MonkeyPatch


# laws that need a second run


def same_in_a_stretch(run: Run) -> None:
    laws.same_decisions(run, drive(run.case, fast=True, checked=False))


def same_again(run: Run) -> None:
    laws.same_decisions(run, drive(run.case, checked=False))


@dataclass(frozen=True)
class Fault:
    """What is broken, the law that must notice it afterwards, and words of its complaint."""

    plant: Callable[[Patch], None]
    law: Callable[[Run], None] | None  # None: the audit or the shadow memory notices while it runs
    words: str


FAULTS = (
    # 1 conservation
    Fault(planted.release_forgets_a_block, laws.conservation, "never given back"),
    Fault(planted.release_forgets_a_block, None, "references"),
    Fault(planted.retain_forgets_to_count, None, "references"),
    Fault(planted.release_frees_shared_blocks, None, "references"),
    Fault(planted.swapped_blocks_are_free_at_once, None, "on their way to host"),
    Fault(planted.aborted_compression_keeps_its_blocks, laws.conservation, "never given back"),
    Fault(planted.shared_prefix_is_compressed_in_place, None, "compresses into a shared block"),
    Fault(planted.hit_covers_the_whole_prompt, None, "which others own too"),
    Fault(planted.prompt_is_matchable_before_it_is_computed, None, "reads"),
    Fault(planted.slot_is_given_twice, None, "slots free|two holders"),
    Fault(planted.window_does_not_need_a_slot, None, "loses a query"),
    Fault(planted.budget_is_not_kept, None, "its budget and prompt allow|its slot covers"),
    # 2 one terminal event
    Fault(planted.refusal_without_event, laws.one_terminal_event, "0 terminal events"),
    Fault(planted.ends_are_told_twice, laws.one_terminal_event, "2 terminal events"),
    # 3 liveness
    Fault(planted.join_drops_a_request, laws.liveness, "nothing runs and nothing is in flight"),
    Fault(planted.join_drops_a_request, None, "decode by the books|is booked"),
    Fault(planted.victim_is_not_requeued, laws.liveness, "nothing runs and nothing is in flight"),
    # 4 refused at the door
    Fault(
        planted.too_large_is_let_in,
        laws.refused_at_the_door,
        "nothing runs and nothing is in flight",
    ),
    Fault(planted.refusal_without_event, laws.refused_at_the_door, "refused late"),
    Fault(planted.message_names_no_numbers, laws.refused_at_the_door, "does not fit"),
    # 5 preemptions bounded, recomputed tokens counted, order kept
    Fault(planted.prefills_are_thrown_out, laws.bounded_preemptions, "was preempted"),
    Fault(
        planted.prefills_are_thrown_out, laws.nobody_gives_way_for_nothing, "gave way and nobody"
    ),
    Fault(
        planted.newcomers_take_what_was_given_up,
        laws.no_admission_with_preemption,
        "preempts, admits",
    ),
    Fault(planted.recomputed_tokens_are_forgotten, laws.recomputed_counted, "booked"),
    Fault(planted.victim_goes_to_the_end_of_the_line, laws.order_kept, "is admitted before"),
    # 6 time
    Fault(planted.admission_is_stamped_before_arrival, laws.time_monotone, "r1"),
    # 7 times add up
    Fault(planted.time_of_a_phase_is_lost, laws.times_add_up, "ns"),
    Fault(planted.first_token_is_stamped_again, laws.times_add_up, "first token at"),
    # 8 the same decisions
    Fault(planted.decisions_depend_on_identity, same_again, "differ"),
    Fault(planted.growth_is_skipped_in_a_stretch, same_in_a_stretch, "differ"),
    Fault(planted.a_stretch_takes_a_step_too_many, same_in_a_stretch, "differ|live-lock"),
    Fault(planted.arrivals_do_not_end_a_stretch, same_in_a_stretch, "differ"),
)


@pytest.fixture(autouse=True)
def _end_live_locks_early(monkeypatch: Patch) -> None:
    monkeypatch.setattr(driver, "MOST_PLANS", 2000)


def complaints(fault: Fault) -> list[str]:
    """What the law says about each scenario."""
    found = []
    for case in SCENARIOS:
        try:
            run = drive(case, checked=fault.law is None)
            if fault.law is not None:
                fault.law(run)
        except (AssertionError, StuckError) as complaint:
            found.append(str(complaint))
    return found


def _name(fault: Fault) -> str:
    return f"{fault.plant.__name__}-{getattr(fault.law, '__name__', 'audit')}"


@pytest.mark.parametrize("fault", FAULTS, ids=_name)
def test_the_fault_is_noticed(fault: Fault, monkeypatch: Patch) -> None:
    fault.plant(monkeypatch)
    said = complaints(fault)
    assert any(re.search(fault.words, words) for words in said), said


@pytest.mark.parametrize("case", SCENARIOS)
def test_nothing_is_noticed_without_a_fault(case: Case) -> None:
    run = drive(case)
    for law in {fault.law for fault in FAULTS if fault.law is not None}:
        if law is not laws.liveness or not any(job_.abort_ns for job_ in case.jobs):
            law(run)
