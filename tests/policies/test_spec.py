"""Policies as TOML, as short forms, and as a user's own file."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house_source import ROOT
from tests.policies import laws
from tests.policies.cases import limits, policies
from tests.policies.drive import Case, drive, job
from zlab.policies.core.block_pool import PromptContent
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import ClassMeans, Join, PoolView
from zlab.policies.core.request import Request
from zlab.policies.options import NoSharing
from zlab.policies.own import OwnClassError, own_class
from zlab.policies.spec import (
    QUESTIONS,
    PolicyError,
    load_policy,
    policy_digest,
    policy_from_table,
    policy_from_toml,
    policy_to_table,
    policy_to_toml,
    presets,
)
from zlab.traces.schema import Status

EXAMPLE = ROOT / "docs" / "examples" / "fewest_left.py"
SHIPPED = ("constrained", "full-kv", "hybrid", "hybrid-adaptive", "nano-vllm", "vllm", "zipage")


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
    """A bare kind means its defaults, for every answer that ships; written out they are the
    same.
    """
    base = policy_to_table(load_policy("hybrid"))
    for question, kinds in QUESTIONS.items():
        for kind, cls in kinds.items():
            policy = policy_from_table({**base, question: kind})
            assert getattr(policy, question) == cls()
            assert set(policy_to_table(policy)[question]) == {
                "kind",
                *(item.name for item in fields(cls)),
            }


def test_variants() -> None:
    policy = load_policy(
        "hybrid:prefix=none,join=blocking,budget.blocks=5,watermark_share=0.1,num_slots=3"
    )
    assert policy.prefix == NoSharing()
    assert policy.compression.join is Join.BLOCKING
    assert policy.budget.floor(16) == 5
    assert policy.admission.watermark(100) == 10
    assert policy.slots.count(100, 5) == 3
    assert (
        policy.name
        == "hybrid:prefix=none,join=blocking,budget.blocks=5,watermark_share=0.1,num_slots=3"
    )
    nested = load_policy("full-kv:order=shortest-output,order.predictor=oracle")
    assert nested.order.key.__self__.predictor.__class__.__name__ == "Oracle"  # type: ignore[attr-defined]


def test_the_digest_is_of_the_settings_not_the_name() -> None:
    hybrid = load_policy("hybrid")
    assert policy_digest(replace(hybrid, name="mine")) == policy_digest(hybrid)
    seen = {
        policy_digest(load_policy(spec))
        for spec in (*SHIPPED, "hybrid:window=8", "hybrid:prefix=none")
    }
    assert len(seen) == len(SHIPPED) + 2


BAD_SPECS = (
    ("hybrd", "unknown policy 'hybrd'; did you mean 'hybrid'"),
    ("hybrid:prefix=nne", "unknown prefix 'nne'; did you mean 'none'"),
    ("hybrid:windw=3", "unknown policy setting 'windw'; did you mean 'window'"),
    (
        "hybrid:slots.num_slot=3",
        "unknown setting of slots 'hybrid' 'num_slot'; did you mean 'num_slots'",
    ),
    ("hybrid:slts.num_slots=3", "unknown question 'slts'; did you mean 'slots'"),
    ("hybrid:window=two", "compression.window must be a int, not 'two'"),
    ("hybrid:window=true", "compression.window must be a int, not True"),
    ("hybrid:window=0", "window must be 1 token or more.* not 0"),
    ("hybrid:join=sometime", "unknown compression.join 'sometime'.*boundary, when_done, blocking"),
    (
        "hybrid:scorer=atention",
        "unknown scorer 'atention'; did you mean 'attention'.*choices: attention, .*, random",
    ),
    ("hybrid:temperature=inf", "temperature must be positive and finite, not inf"),
    ("hybrid:num_slots=-1", "num_slots must be 0 .* not -1"),
    ("hybrid:watermark_share=1.5", r"watermark_share must be in \[0, 1\), not 1.5"),
    ("hybrid:window", "'window' is not of the form key=value"),
    ("hybrid:window=", "'window=' is not of the form key=value"),
    ("hybrid:comes_back=never", "unknown preemption.comes_back 'never'"),
    (
        "hybrid-adaptive:grow_above=0.01",
        "0 <= shrink_below <= grow_above <= 1 must hold, not 0.05 and 0.01",
    ),
    ("hybrid-adaptive:most_tokens=5", "most_tokens must be at least tokens = 2048, not 5"),
    (
        "hybrid:budget.tokens=0",
        "needs at least 2 blocks, or at least 1 kept token, not blocks=0 tokens=0",
    ),
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
    (
        "order",
        {"kind": "shortest-output", "predictor": "orakle"},
        "unknown predictor 'orakle'; did you mean 'oracle'",
    ),
    (
        "batching",
        {"kind": "prefill-first", "cut": "all"},
        "cut must be 'any' or 'first', not 'all'",
    ),
    (
        "admission",
        {"kind": "when-it-fits", "reserve": "all"},
        "reserve must be 'sequence', 'peak' or 'chunk', not 'all'",
    ),
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
    few = SchedulerLimits(
        num_blocks=8, block_size=4, max_batched_tokens=32, max_running=2, max_model_len=100
    )
    jobs = tuple(
        job(f"r{n}", 4, 1 + n, max_tokens=most) for n, most in enumerate((30, 20, 5, 9, 6))
    )
    run = drive(Case(policy, few, jobs))
    for law in (laws.conservation, laws.one_terminal_event, laws.liveness, laws.times_add_up):
        law(run)
    laws.same_decisions(run, drive(run.case, fast=True))
    by_admission = sorted(run.requests, key=lambda request: request.first_admitted_ns)
    assert [request.id for request in by_admission] == [
        "r2",
        "r4",
        "r3",
        "r1",
        "r0",
    ]  # the first two at once
    assert {request.status for request in run.requests} == {Status.FINISHED}


def test_the_example_expects_what_its_class_gave_and_knows_no_lengths() -> None:
    key = load_policy(f"{EXAMPLE}:FewestLeft").order.key
    seen = ClassMeans()
    assert waiting(key, seen, generated=0) == 512
    seen.add("short", 10)
    seen.add("long", 1000)
    assert (waiting(key, seen, "short"), waiting(key, seen, "long"), waiting(key, seen)) == (
        10,
        1000,
        505,
    )
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
    """What the key says is left of a request whose true length, 3 more tokens, nobody may look
    at.
    """
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
    (
        "class Mine:\n    question = 'ordr'\n",
        "Mine",
        "the class must say which question it answers",
    ),
    (
        "class Mine:\n    question = 'order'\n    base = 'hybrd'\n    def key(self, a, b): pass\n",
        "Mine",
        "'hybrd'; did you mean 'hybrid'",
    ),
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


ORDER, KEY = "class Mine(Order):\n", "    def key(self, request, stats):\n        return (0.0,)\n"
DUCK = "class Mine:\n    question = 'order'\n"
BUDGET = "class Mine(Budget):\n"
WRONG_MEMBERS = (
    (
        DUCK + "    max_skip = 3\n" + KEY,
        "unknown member of an order 'max_skip'; did you mean 'max_",
    ),
    (ORDER + "    max_skip = 3\n" + KEY, r"'max_skip'; did you mean 'max_skips'\? \(choices: look"),
    (ORDER + "    speed = 3\n" + KEY, r"unknown member of an order 'speed' \(choices: lookahead, "),
    (ORDER + "    def keys(self, request, stats): pass\n", "'keys'; did you mean 'key'"),
    (
        ORDER + "    def __init__(self):\n        self.lokahead = 3\n" + KEY,
        "'lokahead'; did you mean 'lookahead'",
    ),
    ("@dataclass\n" + ORDER + "    max_skip: int = 3\n" + KEY, "'max_skip'; did you mean 'max_sk"),
    (DUCK, r"an order needs the method key\(request, stats\)"),
    (ORDER + "    pass\n", r"an order needs the method key\(request, stats\)"),
    (
        ORDER + "    def key(self, request):\n        return (0.0,)\n",
        r"key\(request\) cannot be called as key\(request, stats\): too many positional arguments",
    ),
    (
        BUDGET + "    def floor(self, block_size, tokens):\n        return 3\n",
        r"floor\(block_size, tokens\) cannot be called as floor\(block_size\): missing a required",
    ),
    (
        BUDGET + "    def floor(self, n): return 3\n    def may_grow(self, held): return False\n",
        r"may_grow\(held\) cannot be called as may_grow\(held, block_size, pool\)",
    ),
    (ORDER + "    key = 3\n", r"key must be a method key\(request, stats\), not 3"),
    (ORDER + "    async def key(self, request, stats): pass\n", "key must be a plain method"),
    (
        ORDER + "    lookahead = -1\n" + KEY,
        "lookahead must be a whole number .* 0, not -1",
    ),
    (
        ORDER + "    def lookahead(self): return 1\n" + KEY,
        "number of at least 0, not a method",
    ),
    (
        ORDER + "    fair_by_session = 'no'\n" + KEY,
        "session must be True or False, not 'no'",
    ),
    (
        "class Mine(Preemption):\n    comes_back = 'swap'\n    def rank(self, a, b): return 0\n",
        "comes_back must be one of Recovery.RECOMPUTE, Recovery.SWAP, not 'swap'",
    ),
    (
        "class Mine(Slots):\n    needed = None\n",
        "needed must be one of NeedsSlot.NEVER, ",
    ),
    (
        ORDER + "    @property\n    def lookahead(self):\n        return self.nothing\n" + KEY,
        r"lookahead raised AttributeError: 'Mine' object has no attribute 'nothing' \(line 7\)",
    ),
    (
        ORDER + "    def __init__(self): 1 / 0\n" + KEY,
        r"raised ZeroDivisionError: .* \(line 5\)",
    ),
    ("class Mine(Compression):\n    scorer = 'nonsense'\n", "unknown scorer 'nonsense'"),
    ("class Mine(Compression):\n    pool_size = 4\n", "pool_size must be odd and positive, not 4"),
)
HEAD = "from dataclasses import dataclass\nfrom zlab import Budget, Order, Preemption\n"
HEAD += "from zlab.policies.core.policy import Compression, Slots\n"


def own(folder: Path, source: str) -> str:
    """A file with the class, and how a command line names it."""
    path = folder / "own.py"
    path.write_text(HEAD + source, "utf-8")
    return f"{path}:Mine"


@pytest.mark.parametrize(("source", "message"), WRONG_MEMBERS)
def test_members_and_signatures_are_checked_when_a_class_is_read(
    tmp_path: Path, source: str, message: str
) -> None:
    spec = own(tmp_path, source)
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(spec)
    assert str(caught.value).startswith(spec)
    assert "\n" not in str(caught.value)


def test_a_class_needs_only_what_its_question_has_no_default_for(tmp_path: Path) -> None:
    order = load_policy(own(tmp_path, ORDER + KEY)).order
    assert (order.lookahead, order.max_skips, order.fair_by_session) == (0, 16, False)
    duck = load_policy(own(tmp_path, DUCK + KEY)).order
    assert (duck.lookahead, duck.max_skips, duck.fair_by_session) == (0, 16, False)
    policy = load_policy(own(tmp_path, BUDGET + "    def floor(self, size):\n        return 3\n"))
    view = PoolView(10, 5, 1, 1)
    assert [policy.budget.may_grow(held, 4, view) for held in (2, 3)] == [True, False]
    assert policy.budget.shrink_to(7, 4, view) == 3
    assert policy_from_toml(policy_to_toml(policy)).budget.floor(4) == 3
    slotless = "class Mine(Compression):\n    scorer = 'recent'\n"
    assert not load_policy(own(tmp_path, slotless)).compression.needs_queries


def test_helpers_and_settings_of_a_class_are_its_own_affair(tmp_path: Path) -> None:
    """A name that the class itself reads is no misspelt member, however much it looks like one."""
    source = "@dataclass(frozen=True)\n" + ORDER + "    keys: int = 2\n    weight = 3\n"
    source += "    def max_skip(self):\n        return self.keys * self.weight\n"
    source += "    def key(self, request, stats):\n        return (self.max_skip(),)\n"
    policy = load_policy(f"hybrid:order={own(tmp_path, source)},order.keys=5")
    assert policy.order.key(None, None) == (15,)  # type: ignore[arg-type]


def test_a_class_must_answer_the_question_it_is_given_for(tmp_path: Path) -> None:
    spec = own(tmp_path, BUDGET + "    def floor(self, size):\n        return 3\n")
    with pytest.raises(PolicyError, match="answers the question 'budget', not 'order'"):
        load_policy(f"hybrid:order={spec}")


WRONG_ANSWERS = (
    (
        ORDER + "    def key(self, request, stats):\n        return (request.prompt_tokns,)\n",
        r"key raised AttributeError: 'Request' object has no attribute 'prompt_tokns' \(line 6\)",
    ),
    (
        ORDER + "    def key(self, request, stats):\n        return _deep(request)\n"
        "def _deep(request):\n    return {}[request.id]\n",
        r"key raised KeyError: 'r0' \(line 8\)",
    ),
    (
        ORDER + "    def key(self, request, stats):\n        return None\n",
        "key must give a tuple of numbers, not None",
    ),
    (
        ORDER + "    def key(self, request, stats):\n        return (float('nan'),)\n",
        r"key must give a tuple of numbers, not \(nan,\)",
    ),
    (
        "class Mine(Preemption):\n    def rank(self, request, needy):\n        return 'me'\n",
        "rank must give a whole number or None, not 'me'",
    ),
    (
        BUDGET + "    def floor(self, size): return 3\n"
        "    def shrink_to(self, held, size, pool): return held + 1\n",
        "shrink_to must give 3 to 3 blocks, from its floor to what the request has, not 4",
    ),
    (
        BUDGET + "    def floor(self, size): return 3\n"
        "    def may_grow(self, held, size, pool): held < 3\n",
        "may_grow must give True or False, not None",
    ),
)


@pytest.mark.parametrize(("source", "message"), WRONG_ANSWERS)
def test_what_a_class_does_wrong_in_a_run_is_one_line(
    tmp_path: Path, source: str, message: str
) -> None:
    spec = own(tmp_path, source)
    limits = SchedulerLimits(num_blocks=7, block_size=4, max_batched_tokens=64, max_running=4)
    jobs = tuple(job(f"r{n}", 10, 16) for n in range(3))
    question = own_class(spec).question
    base = "hybrid" if question == "budget" else "full-kv"
    policy = load_policy(f"{base}:{question}={spec},window=2")
    with pytest.raises(OwnClassError, match=message) as caught:
        drive(Case(policy, limits, jobs))
    assert str(caught.value).startswith(f"{spec}: ")
    assert "\n" not in str(caught.value)


def test_a_request_has_the_names_of_the_field_beside_the_old_ones(tmp_path: Path) -> None:
    content = PromptContent(4, 4, None, None, None)
    request = Request(0, "r", 0, 4, None, 3, content, cls="chat", session="s")
    request.generated = 2
    assert (request.num_prompt_tokens, request.num_output_tokens) == (4, 2)
    assert (request.request_class, request.session_id) == ("chat", "s")


OLD_IMPORTS = """
import sys
from policies import core
from policies.admission import WhenItFits
from policies.batching import Mixed, PrefillFirst
from policies.budget import Adaptive, Fixed, Unlimited, blocks_of, check
from policies.compression import ByScore
from policies.core.policy import Admission, Batching, Budget, ClassMeans, ComesBack, Compression
from policies.core.policy import History, Join, Key, NeedsSlot, Order, Policy, PoolView, Preemption
from policies.core.policy import Prefix, Slots
from policies.core.request import NUM_PHASES, Phase, Request, Status
from policies.ordering import FairShare, FirstCome, PriorityWithAgeing, ShortestOutput
from policies.ordering import ShortestPrompt, SkipAhead
from policies.predict import ClassMean, NoisyOracle, Oracle, Predictor
from policies.preemption import GivesWay, LatestBehind, LatestFirst, Never, SlotlessFirst
from policies.prefix import FullBlocks, NoSharing
from policies.slots import Constrained, Hybrid, NoSlots, SlotCount
import policies.core.request

class Mine:
    question = "preemption"
    base = "full-kv"
    comes_back = ComesBack.SWAP
    names = sorted(name for name in sys.modules if name.split(".")[0] == "policies")

    def rank(self, request: Request, needy: Request) -> int | None:
        return request.number
"""


def test_an_own_class_may_import_by_the_names_of_release_0_1_0(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text(OLD_IMPORTS, "utf-8")
    policy = load_policy(f"{path}:Mine")
    assert (
        policy.preemption.comes_back is load_policy("full-kv:comes_back=swap").preemption.comes_back
    )
    assert "policies.predict" in policy.preemption.names  # type: ignore[attr-defined]
    assert not [name for name in sys.modules if name.split(".")[0] == "policies"]


def test_a_package_of_the_users_own_that_is_named_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "__init__.py").write_text("LOOKAHEAD = 7\n", "utf-8")
    path = tmp_path / "own.py"
    text = "from policies import LOOKAHEAD\n\nclass Mine:\n    question = 'order'\n"
    text += "    lookahead, max_skips, fair_by_session = LOOKAHEAD, 1, False\n"
    text += "    def key(self, request, history):\n        return (0.0,)\n"
    path.write_text(text, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_policy(f"{path}:Mine").order.lookahead == 7
    sys.modules.pop("policies")
