"""Length profiles: what an evaluation writes, what a simulation makes of it, what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zlab.policies.spec import load_policy
from zlab.sim.length_profile import (
    assumed_lengths,
    make_length_profiles,
    read_length_profile,
)
from zlab.sim.replay import Scenario
from zlab.sim.specs import SimError
from zlab.traces.workload import TraceRequest, Workload, WorkloadMeta

BLOCK = 16


def column(policy: str, budget: int | None, ratio: float | None, **more: Any) -> dict[str, Any]:
    compared = ratio and {
        "length_ratio": ratio,
        "length_ratio_interval": [ratio - 0.1, ratio + 0.1],
    }
    return {
        "name": policy,
        "policy": policy,
        "budget_tokens": budget,
        "temperature": 0.0,
        "pass_at_1": 0.9,
        "pass_at_1_interval": [0.8, 0.95],
        "mean_output_tokens": 400.0,
        "problems": 100,
        "share_at_cap": 0.01,
        "of_baseline": compared,
        **more,
    }


RESULTS: dict[str, Any] = {
    "model": "tiny-reasoner",
    "made_at": "2026-12-01T00:00:00Z",
    "data": [{"name": "chain"}],
    "columns": [
        column("full-kv", None, None, pass_at_1=1.0),
        column("hybrid:tokens=64,window=8", 64, 1.5, pass_at_1=0.5),
        column("hybrid:tokens=128,window=8", 128, 1.1, pass_at_1=0.9),
        column("hybrid:tokens=128,window=8,scorer=recent", 128, 0.7, pass_at_1=0.0),
        column("hybrid:tokens=128,window=8", 128, 1.3, temperature=0.7),
        column("full-kv", None, None, temperature=0.7),
    ],
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(make_length_profiles(RESULTS)[0.0]))
    return path


def test_each_temperature_has_a_profile() -> None:
    profiles = make_length_profiles(RESULTS)
    assert {heat: len(one["entries"]) for heat, one in profiles.items()} == {0.0: 3, 0.7: 1}
    assert profiles[0.0]["baseline"]["pass_at_1"] == 1.0


@pytest.mark.parametrize(
    ("policy", "multiplier", "accuracy"),
    [
        ("hybrid:tokens=64,window=8", 1.5, 0.5),
        ("constrained:tokens=128,window=8,join=blocking", 1.1, 0.9),  # the same tokens are kept
        ("hybrid:tokens=96,window=8", 1.3, 0.7),  # half way between
        ("hybrid:blocks=7,window=8", 1.3, 0.7),
        ("hybrid:tokens=128,window=8,scorer=recent", 0.7, 0.0),
        ("full-kv", 1.0, 1.0),
    ],
)
def test_a_measured_policy_is_known(
    profile: Path, policy: str, multiplier: float, accuracy: float
) -> None:
    found = read_length_profile(profile).of(load_policy(policy), BLOCK)
    assert found.is_known
    assert found.multiplier == pytest.approx(multiplier)
    assert found.pass_at_1 == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("hybrid:tokens=256,window=8", "budgets of 64 to 128 tokens, not 256"),
        ("hybrid:tokens=32,window=8", "budgets of 64 to 128 tokens, not 32"),
        ("hybrid:tokens=64,window=16", "has no such compression"),
        ("hybrid:tokens=64,window=8,scorer=random", "has no such compression"),
        ("hybrid:tokens=64,window=8,sink=4", "has no such compression"),
    ],
)
def test_what_was_not_measured_is_not_known(profile: Path, policy: str, words: str) -> None:
    found = assumed_lengths(load_policy(policy), BLOCK, 1.0, str(profile))
    assert not found.is_known
    assert found.multiplier == 1.0
    assert words in found.source
    assert "measured with tiny-reasoner" in found.source
    assert found.pass_at_1 is None


def test_without_a_profile_nothing_is_known_of_a_policy_that_compresses() -> None:
    hybrid = load_policy("hybrid")
    assert assumed_lengths(hybrid, BLOCK, 1.0, None).as_dict() == {
        "multiplier": 1.0,
        "known": False,
        "source": "not known: no length profile was given",
        "interval": None,
        "pass_at_1": None,
    }
    given = assumed_lengths(hybrid, BLOCK, 1.4, None)
    assert (given.multiplier, given.is_known, given.source) == (1.4, True, "given")
    whole = assumed_lengths(load_policy("full-kv"), BLOCK, 1.4, None)
    assert (whole.multiplier, whole.is_known) == (1.0, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "its format is None, not 'zlab-length-profile/1'"),
        ('{"format": "zlab-length-profile/2"}', "its format is 'zlab-length-profile/2'"),
        ('{"format": "zlab-length-profile/1"}', "cannot be read: KeyError('entries')"),
        ("-1", "multiplier must be a finite number above 0, got -1.0"),
    ],
)
def test_a_file_that_is_no_profile(
    profile: Path, tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "wrong.json"
    if content == "-1":
        document = json.loads(profile.read_text())
        document["entries"][0]["multiplier"] = -1.0
        content = json.dumps(document)
    if content is not None:
        path.write_text(content)
    with pytest.raises(SimError, match=re.escape(f"length profile {path}: ") + ".*") as found:
        read_length_profile(path)
    assert words in str(found.value)


def load() -> Workload:
    requests = [
        TraceRequest(id=str(n), prompt_tokens=20, output_tokens=200, max_tokens=200)
        for n in range(6)
    ]
    return Workload(requests, WorkloadMeta(name="six"))


def test_a_scenario_uses_the_profile_and_its_recording_says_so(
    profile: Path, tmp_path: Path
) -> None:
    spec = "constrained:tokens=64,window=8"
    scenario = Scenario(spec, kv_blocks=60, block_size=BLOCK, length_profile=str(profile))
    run = scenario.run(load())
    assert run.requests["output_tokens"].to_pylist() == [300] * 6
    assert run.manifest["length_multiplier"] == 1.5
    assert run.manifest["lengths"]["pass_at_1"] == 0.5
    assert run.summary["solved_per_s"] == pytest.approx(0.5 * run.summary["requests_per_s"])
    unknown = Scenario(spec, kv_blocks=60, block_size=BLOCK).run(load())
    assert unknown.summary["solved_per_s"] is None
    assert not unknown.manifest["lengths"]["known"]


def test_a_profile_goes_with_no_multiplier_and_no_change_of_the_policy(profile: Path) -> None:
    given = Scenario("hybrid", length_profile=str(profile), length_multiplier=1.5)
    with pytest.raises(SimError, match=r"length-multiplier 1.5 cannot be given together with"):
        given.set_up()
    changed = Scenario("hybrid", length_profile=str(profile), changes=("3:full-kv",))
    with pytest.raises(SimError, match="is looked up for one policy"):
        changed.set_up()
