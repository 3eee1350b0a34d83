"""The laws across changes of the policy, at random steps, among all presets and random policies."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies import laws
from tests.policies.cases import Draw, cases, policies, preset_policies
from tests.policies.drive import Case, drive
from tests.policies.test_laws import all_laws

EXAMPLES = 120


@st.composite
def changing(draw: Draw, presets_only: bool = False, disturbed: bool = True) -> Case:
    """A case in which other policies take over, once or several times, also twice before one step."""
    case = draw(cases(presets_only, disturbed))
    others = preset_policies(case.limits)
    if not presets_only:
        others = st.one_of(others, policies(case.limits))
    steps = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=5)))
    return replace(case, changes=tuple((step, draw(others)) for step in steps))


@settings(max_examples=2 * EXAMPLES)
@given(changing(disturbed=False))
def test_laws_hold_across_changes_and_quiet_stretches_change_nothing(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(changing())
def test_laws_hold_across_changes_with_aborts_failures_and_early_stops(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=True)
    laws.same_decisions(run, drive(case, fast=True))


@settings(max_examples=EXAMPLES)
@given(changing(presets_only=True, disturbed=False))
def test_laws_hold_across_changes_between_presets(case: Case) -> None:
    run = drive(case)
    all_laws(run, disturbed=False)
    laws.same_decisions(run, drive(case, fast=True))
