"""Policies as TOML, as short forms, and as a user's own file."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalogue import QUESTIONS
from policies.core.limits import Limits
from policies.core.policy import ClassMeans, Join
from policies.core.prefix import PromptContent
from policies.core.request import Request, Status
from policies.prefix import NoSharing
from policies.spec import (
    PolicyError,
    load_policy,
    policy_digest,
    policy_from_table,
    policy_from_toml,
    policy_to_table,
    policy_to_toml,
    presets,
)
from tests.house_source import ROOT
from tests.policies import laws
from tests.policies.cases import limits, policies
from tests.policies.drive import Case, drive, job

EXAMPLE = ROOT / "docs" / "examples" / "fewest_left.py"
SHIPPED = ("constrained", "full-kv", "hybrid", "hybrid-adaptive", "nano-vllm", "zipage")


def test_the_presets_that_ship() -> None:
    assert tuple(presets()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_preset_through_toml(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    again = policy_from_toml(policy_to_toml(policy))
    assert again == policy
    assert policy_digest(again) == policy_digest(policy)


@settings(max_examples=80)
@given(st.data())
def test_any_policy_through_toml(data: st.DataObject) -> None:
    policy = data.draw(policies(data.draw(limits())))
    assert policy_from_toml(policy_to_toml(policy)) == policy
    assert policy_from_table(policy_to_table(policy)) == policy


def test_every_kind_is_its_defaults() -> None:
    """A bare kind means its defaults, for every answer that ships; written out they are the same."""
    base = policy_to_table(load_policy("hybrid"))
    for question, kinds in QUESTIONS.items():
        for kind, cls in kinds.items():
            policy = policy_from_table({**base, question: kind})
            assert getattr(policy, question) == cls()
            assert set(policy_to_table(policy)[question]) == {"kind", *(item.name for item in fields(cls))}


def test_variants() -> None:
    policy = load_policy("hybrid:prefix=none,join=blocking,budget.blocks=5,watermark_share=0.1,num_slots=3")
    assert policy.prefix == NoSharing()
    assert policy.compression.join is Join.BLOCKING
    assert policy.budget.floor(16) == 5
    assert policy.admission.watermark(100) == 10
    assert policy.slots.count(100, 5) == 3
    assert policy.name == "hybrid:prefix=none,join=blocking,budget.blocks=5,watermark_share=0.1,num_slots=3"
    nested = load_policy("full-kv:order=shortest-output,order.predictor=oracle")
    assert nested.order.key.__self__.predictor.__class__.__name__ == "Oracle"  # type: ignore[attr-defined]


def test_the_digest_is_of_the_settings_not_the_name() -> None:
    hybrid = load_policy("hybrid")
    assert policy_digest(replace(hybrid, name="mine")) == policy_digest(hybrid)
    seen = {policy_digest(load_policy(spec)) for spec in (*SHIPPED, "hybrid:window=8", "hybrid:prefix=none")}
    assert len(seen) == len(SHIPPED) + 2


BAD_SPECS = (
    ("hybrd", "unknown policy 'hybrd'; did you mean 'hybrid'"),
    ("hybrid:prefix=nne", "unknown prefix 'nne'; did you mean 'none'"),
    ("hybrid:windw=3", "unknown policy setting 'windw'; did you mean 'window'"),
    ("hybrid:slots.num_slot=3", "unknown setting of slots 'hybrid' 'num_slot'; did you mean 'num_slots'"),
    ("hybrid:slts.num_slots=3", "unknown question 'slts'; did you mean 'slots'"),
    ("hybrid:window=two", "compression.window must be a int, not 'two'"),
    ("hybrid:window=true", "compression.window must be a int, not True"),
    ("hybrid:window=0", "window must be 1 token or more.* not 0"),
    ("hybrid:join=sometime", "unknown compression.join 'sometime'.*boundary, when_done, blocking"),
    ("hybrid:num_slots=-1", "num_slots must be 0 .* not -1"),
    ("hybrid:watermark_share=1.5", r"watermark_share must be in \[0, 1\), not 1.5"),
    ("hybrid:window", "'window' is not of the form key=value"),
    ("hybrid:window=", "'window=' is not of the form key=value"),
    ("hybrid:comes_back=never", "unknown preemption.comes_back 'never'"),
    ("hybrid-adaptive:grow_above=0.01", "0 <= shrink_below <= grow_above <= 1 must hold, not 0.05 and 0.01"),
    ("hybrid-adaptive:most_tokens=5", "most_tokens must be at least tokens = 2048, not 5"),
    ("hybrid:budget.tokens=0", "needs at least 2 blocks, or at least 1 kept token, not blocks=0 tokens=0"),
    ("hybrid:budget.blocks=1", "needs at least 2 blocks"),
    ("nowhere.toml", "no policy file 'nowhere.toml'"),
    ("nowhere.py:Mine", "no such file: nowhere.py"),
    ("entry:nobody", "no entry point 'nobody'"),
)


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_a_bad_spec_is_an_error_that_says_what_would_do(spec: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(spec)


BAD_TOML: tuple[tuple[str, Any, str], ...] = (
    ("order", None, "leaves the question 'order' open"),
    ("order", 3, "order must be a kind or a table with a kind, not 3"),
    ("order", {}, "order has no kind"),
    ("order", {"kind": "first-come", "lookahed": 2}, "'lookahed'; did you mean 'lookahead'"),
    ("order", {"kind": "first-come", "lookahead": -2}, "lookahead and max_skips must be 0 or more"),
    ("order", {"kind": "shortest-output", "predictor": "orakle"}, "unknown predictor 'orakle'; did you mean 'oracle'"),
    ("batching", {"kind": "prefill-first", "cut": "all"}, "cut must be 'any' or 'first', not 'all'"),
    ("admission", {"kind": "when-it-fits", "reserve": "all"}, "reserve must be 'sequence' or 'peak', not 'all'"),
)


@pytest.mark.parametrize(("question", "answer", "message"), BAD_TOML)
def test_a_bad_table_is_an_error(question: str, answer: Any, message: str) -> None:
    table = policy_to_table(load_policy("hybrid"))
    if answer is None:
        del table[question]
    else:
        table[question] = answer
    with pytest.raises(PolicyError, match=message):
        policy_from_table(table)


def test_toml_that_is_none() -> None:
    with pytest.raises(PolicyError, match="mine: not valid TOML"):
        policy_from_toml("order = ", "mine")


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(policy_to_toml(load_policy("hybrid:window=8")), "utf-8")
    assert load_policy(f"{path}:prefix=none").compression.window == 8


# a user's own policy


def test_the_example_is_short_and_runs_under_the_laws() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
    policy = load_policy(f"{EXAMPLE}:FewestLeft:budget.blocks=3,budget.tokens=0,window=2")
    few = Limits(num_blocks=8, block_size=4, max_batched_tokens=32, max_running=2, max_model_len=100)
    jobs = tuple(job(f"r{n}", 4, 1 + n, max_tokens=most) for n, most in enumerate((30, 20, 5, 9, 6)))
    run = drive(Case(policy, few, jobs))
    for law in (laws.conservation, laws.one_terminal_event, laws.liveness, laws.times_add_up):
        law(run)
    laws.same_decisions(run, drive(run.case, fast=True))
    by_admission = sorted(run.requests, key=lambda request: request.first_admitted_ns)
    assert [request.id for request in by_admission] == ["r2", "r4", "r3", "r1", "r0"]  # the first two at once
    assert {request.status for request in run.requests} == {Status.FINISHED}


def test_the_example_expects_what_its_class_gave_and_knows_no_lengths() -> None:
    key = load_policy(f"{EXAMPLE}:FewestLeft").order.key
    seen = ClassMeans()
    assert waiting(key, seen, generated=0) == 512
    seen.add("short", 10)
    seen.add("long", 1000)
    assert (waiting(key, seen, "short"), waiting(key, seen, "long"), waiting(key, seen)) == (10, 1000, 505)
    assert waiting(key, seen, "short", generated=7) == 3
    assert waiting(key, seen, "short", generated=70) == 70, "outlived: as much again"
    assert waiting(key, seen, "long", generated=7, max_tokens=50) == 43


def waiting(
    key: Callable[[Request, ClassMeans], tuple[float, ...]],
    seen: ClassMeans,
    cls: str | None = None,
    generated: int = 0,
    max_tokens: int | None = None,
) -> float:
    """What the key says is left of a request whose true length, 3 more tokens, nobody may look at."""
    content = PromptContent(4, 4, None, None, None)
    request = Request(0, "r", 0, 4, max_tokens, generated + 3, content, cls=cls)
    request.generated = generated
    return key(request, seen)[0]


def test_the_example_through_toml_and_digest(tmp_path: Path) -> None:
    copy = tmp_path / "mine.py"
    copy.write_text(EXAMPLE.read_text("utf-8"), "utf-8")
    policy = load_policy(f"{copy}:FewestLeft")
    again = policy_from_toml(policy_to_toml(policy))
    assert policy_digest(again) == policy_digest(policy)
    assert policy_digest(policy) != policy_digest(load_policy("hybrid"))
    copy.write_text(EXAMPLE.read_text("utf-8").replace("lookahead = 4", "lookahead = 5"), "utf-8")
    assert load_policy(f"{copy}:FewestLeft").order.lookahead == 5
    assert load_policy(f"hybrid:order={copy}:FewestLeft").order.lookahead == 5


OWN_FAULTS = (
    ("class Mine:\n    pass\n", "Mine", "the class must say which question it answers"),
    ("class Mine:\n    question = 'ordr'\n", "Mine", "the class must say which question it answers"),
    ("class Mine:\n    question = 'order'\n    base = 'hybrd'\n", "Mine", "'hybrd'; did you mean 'hybrid'"),
    ("class Mine:\n    question = 'order'\n", "Yours", r"no class 'Yours' \(it has: Mine\)"),
    ("1 / 0\n", "Mine", "the file does not run: ZeroDivisionError"),
    ("class Mine:\n    def __init__(self, x): pass\n", "Mine", "constructible without arguments"),
)


@pytest.mark.parametrize(("source", "name", "message"), OWN_FAULTS)
def test_a_users_fault_is_named(tmp_path: Path, source: str, name: str, message: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(source, "utf-8")
    with pytest.raises(PolicyError, match=message):
        load_policy(f"{path}:{name}")
