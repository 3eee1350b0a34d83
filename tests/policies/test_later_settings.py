"""A setting that is added to a policy: its default changes nothing, any other value changes all."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.policies.records import HERE, record
from zlab.policies import spec
from zlab.policies.budget import Fixed
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy, since
from zlab.policies.options import ByScore
from zlab.policies.ordering import ClassMean, Oracle, ShortestOutput
from zlab.policies.registry import DeploymentStage, PolicyRegistry
from zlab.policies.snapshot import (
    PolicyChange,
    PolicySnapshot,
    read_changes,
    store_policy,
    stored_from_dict,
)
from zlab.policies.spec import (
    NESTED,
    QUESTIONS,
    PolicyError,
    load_policy,
    policy_digest,
    policy_mark,
    policy_to_table,
    policy_to_toml,
)
from zlab.sim.cost_model import Change
from zlab.sim.replay import replay
from zlab.traces.synthetic import fixed


class Keys(Enum):
    """Values of a later setting."""

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True)
class FixedWithMargin(Fixed):
    margin: int = field(default=0, metadata=since("0.2.0"))
    share: float = field(default=1.0, metadata=since("0.2.0"))


@dataclass(frozen=True)
class ByScoreWithKeys(ByScore):
    keys: Keys = field(default=Keys.FULL, metadata=since("0.2.0"))


@dataclass(frozen=True)
class ClassMeanWithFloor(ClassMean):
    least: float = field(default=1.0, metadata=since("0.2.0"))


@dataclass(frozen=True)
class ShortestWithSecond(ShortestOutput):
    predictor: Any = field(default_factory=ClassMeanWithFloor)


@dataclass(frozen=True)
class Precision:
    """A later question's answer."""

    bits: int = 16


@dataclass(frozen=True)
class Halved(Precision):
    bits: int = 8


SPECS = (
    "hybrid",
    "hybrid:blocks=4,window=3",
    "constrained",
    "full-kv",
    "hybrid:order=shortest-output",
)
OTHER = {  # short form -> where its value stands
    "hybrid:margin=2": ("budget", "margin", 2),
    "hybrid:share=2": ("budget", "share", 2.0),
    "hybrid:keys=half": ("compression", "keys", "half"),
    "hybrid:precision.bits=8": ("precision", "bits", 8),
    "hybrid:precision=halved": ("precision", "kind", "halved"),
}


@pytest.fixture
def before() -> dict[str, PolicySnapshot]:
    """Policies as they are stored before the settings exist."""
    return {name: store_policy(load_policy(name)) for name in SPECS}


@pytest.fixture
def later(before: dict[str, PolicySnapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the groups have further settings, and a policy has a further question."""
    monkeypatch.setitem(QUESTIONS["budget"], "fixed", FixedWithMargin)
    monkeypatch.setitem(QUESTIONS["compression"], "by-score", ByScoreWithKeys)
    monkeypatch.setitem(QUESTIONS["order"], "shortest-output", ShortestWithSecond)
    monkeypatch.setitem(NESTED["predictor"], "class-mean", ClassMeanWithFloor)
    precisions: dict[str, type[Any]] = {"plain": Precision, "halved": Halved}
    monkeypatch.setitem(QUESTIONS, "precision", precisions)
    more = [("precision", Precision, field(default=Precision(), metadata=since("0.2.0")))]
    monkeypatch.setattr(
        spec, "Policy", make_dataclass("Policy", more, bases=(Policy,), frozen=True)
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.usefixtures("later")
def test_at_its_default_nothing_changes(before: dict[str, PolicySnapshot], name: str) -> None:
    was, policy = before[name], load_policy(name)
    assert policy_to_toml(policy) == was.toml
    assert store_policy(policy) == was
    assert policy_mark(policy) == int(was.digest[:15], 16)
    back = was.load()
    assert back == policy, "a stored policy that lacks the settings has their defaults"
    assert store_policy(back) == was
    assert policy_to_table(back)["precision"] == {"kind": "plain", "bits": 16}, (
        "`zlab policy show` has them all"
    )


@pytest.mark.usefixtures("later")
def test_a_default_that_is_written_out_is_the_same_policy(
    before: dict[str, PolicySnapshot],
) -> None:
    for name in SPECS:
        text = policy_to_toml(load_policy(name), every_setting=True)
        assert tomllib.loads(text)["precision"] == {"kind": "plain", "bits": 16}
        written = PolicySnapshot(name, text, before[name].digest, {})
        written.check()
        assert policy_digest(written.load()) == before[name].digest
    named = load_policy("hybrid:margin=0,share=1,keys=full,precision=plain")
    assert policy_digest(named) == before["hybrid"].digest
    assert policy_to_toml(replace(named, name="hybrid")) == before["hybrid"].toml


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.usefixtures("later")
def test_any_other_value_changes_all(before: dict[str, PolicySnapshot], name: str) -> None:
    question, key, value = OTHER[name]
    policy = load_policy(name)
    stored = store_policy(policy)
    assert tomllib.loads(stored.toml)[question][key] == value
    assert stored.digest != before["hybrid"].digest
    assert policy_mark(policy) != policy_mark(load_policy("hybrid"))
    assert stored.load() == policy
    with pytest.raises(PolicyError, match="is not what it was"):
        replace(before["hybrid"], toml=stored.toml).check()
    with pytest.raises(PolicyError, match="is not what it was"):
        replace(stored, toml=before["hybrid"].toml).check()


@pytest.mark.usefixtures("later")
def test_a_setting_of_a_nested_choice(before: dict[str, PolicySnapshot]) -> None:
    was = before["hybrid:order=shortest-output"]
    assert "least" not in was.toml
    table = tomllib.loads(was.toml)
    table["order"]["predictor"]["least"] = 1  # a whole number does for the default 1.0
    assert (
        policy_digest(spec.policy_from_table(table)) == spec.table_digest(table, {}) == was.digest
    )
    table["order"]["predictor"]["least"] = 2.0
    assert (
        policy_digest(spec.policy_from_table(table)) == spec.table_digest(table, {}) != was.digest
    )
    assert (
        spec.policy_from_table({**table, "order": "shortest-output"}).order == ShortestWithSecond()
    )
    assert load_policy(
        "hybrid:order=shortest-output,order.predictor=oracle"
    ).order == ShortestWithSecond(predictor=Oracle())


def run_with_change(specs: Sequence[str]) -> dict[str, Any]:
    """The manifest of a run under the first policy, then the second."""
    workload = fixed(num_requests=4, prompt=40, output=90, rate_per_s=100.0, seed=0)
    limits = SchedulerLimits(num_blocks=30, block_size=16)
    changes = [Change(6, load_policy(specs[1]))]
    manifest = replay(workload, specs[0], limits=limits, changes=changes).manifest
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    return found


RUN = ("full-kv", "hybrid:blocks=4,window=3")


def test_recordings_with_a_change(request: pytest.FixtureRequest) -> None:
    was = run_with_change(RUN)
    request.getfixturevalue("later")
    now = run_with_change(RUN)
    for key in ("digest", "policy_toml", "policy_digest", "policy_changes"):
        assert now[key] == was[key], key
    (change,) = read_changes(was)
    assert isinstance(change, PolicyChange)
    assert change.policy == load_policy(RUN[1])
    other = run_with_change((RUN[0], f"{RUN[1]},keys=half"))
    assert other["digest"] != was["digest"], "the row of the change is another one"


def test_a_registry_with_a_live_policy(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    registry = PolicyRegistry(tmp_path / "registry.db")
    policy = store_policy(load_policy("hybrid"))
    evidence = record(policy)
    registry.add_evidence(evidence, "ann")
    registry.promote(policy, DeploymentStage.LIVE, HERE, "ann")
    request.getfixturevalue("later")
    standing = registry.live(HERE)
    assert standing is not None
    assert standing.policy.load() == load_policy("hybrid")
    assert standing.evidence == evidence
    assert [one.id for one in registry.evidence_on(load_policy("hybrid"))] == [evidence.id]
    with pytest.raises(PolicyError, match="budget must be a table with a kind, not 'fixed'"):
        stored_from_dict({"name": "x", "toml": 'budget = "fixed"', "digest": "0" * 64})
