"""Each law is seen to fail on a fault planted into the core: a check that cannot fail holds nothing."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from policies.core.errors import StuckError
from tests.policies import drive as driver
from tests.policies import laws, planted
from tests.policies.drive import Case, Run, drive
from tests.policies.scenarios import SCENARIOS

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
    Fault(planted.too_large_is_let_in, laws.refused_at_the_door, "nothing runs and nothing is in flight"),
    Fault(planted.refusal_without_event, laws.refused_at_the_door, "refused late"),
    Fault(planted.message_names_no_numbers, laws.refused_at_the_door, "does not fit"),
    # 5 preemptions bounded, recomputed tokens counted, order kept
    Fault(planted.prefills_are_thrown_out, laws.bounded_preemptions, "was preempted"),
    Fault(planted.prefills_are_thrown_out, laws.nobody_gives_way_for_nothing, "gave way and nobody"),
    Fault(planted.newcomers_take_what_was_given_up, laws.no_admission_with_preemption, "preempts, admits"),
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
