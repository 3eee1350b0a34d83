"""What commit e002be3 wrote is read by the code of today, and every decision in it is made again.

The files and how they were made: `tests/fixtures/e002be3/README.md`. The tests use the
command line where they can, because modules move and the command line is a contract.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.shared import SHARED, needs_shared
from tests.zlab.command_line import errors, zlab
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import Target, read_evidence
from zlab.policies.registry import DeploymentStage, PolicyRegistry
from zlab.policies.snapshot import read_changes, store_policy, stored_from_dict
from zlab.policies.spec import load_policy, policy_digest, policy_mark
from zlab.sim.profiles import load_profile
from zlab.traces.recording import Recording, first_difference

WRITTEN = Path(__file__).parent / "fixtures" / "e002be3"
POLICIES: dict[str, dict[str, Any]] = json.loads((WRITTEN / "policies.json").read_text("utf-8"))
DECISIONS = json.loads((WRITTEN / "decisions.json").read_text("utf-8"))
SIMULATED = json.loads((WRITTEN / "recordings" / "simulated.json").read_text("utf-8"))
HERE, THERE = Target("qwen3-8b", "h200"), Target("qwen3-8b", "h100")
HYBRID, OWN = "hybrid:tokens=96", "own_order.py:FewestLeft:tokens=96"


@pytest.fixture(autouse=True)
def at_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is a copy of the files: own classes are named by relative paths."""
    folder = tmp_path / "written"
    shutil.copytree(WRITTEN, folder)
    for name in ("own_order", "own_budget"):
        (folder / f"{name}.txt").rename(folder / f"{name}.py")
    (folder / "registry.db").write_bytes(gzip.decompress((folder / "registry.db.gz").read_bytes()))
    monkeypatch.chdir(folder)


def shown(*arguments: str) -> Any:
    """The JSON of a command that goes well."""
    result = zlab(*arguments, "--json")
    assert result.exit_code == 0, errors(result)
    return json.loads(result.stdout)


def each(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


# policies


@pytest.mark.parametrize("spec", POLICIES)
def test_a_stored_policy_is_what_it_was(spec: str) -> None:
    written = POLICIES[spec]
    stored = stored_from_dict(written)
    policy = stored.load()
    assert (policy_digest(policy), policy_mark(policy)) == (written["digest"], written["mark"])
    assert store_policy(policy).as_dict() == {
        key: written[key] for key in ("name", "digest", "toml", "sources")
    }


@pytest.mark.parametrize(
    "spec", [spec for spec in POLICIES if not spec.startswith("shortest-output ")]
)
def test_a_policy_by_its_name_is_what_it_was(spec: str) -> None:
    """Presets and short forms mean today what they meant then."""
    assert store_policy(load_policy(spec)).as_dict() == {
        key: POLICIES[spec][key] for key in ("name", "digest", "toml", "sources")
    }


@pytest.mark.parametrize(
    "path", sorted((WRITTEN / "policies").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_policy_file_is_what_it_was(path: Path) -> None:
    names = {"varied": "hybrid-adaptive:tokens=128,most_tokens=300,grow_above=0.4,shrink_below=0.2"}
    assert (
        policy_digest(load_policy(str(path))) == POLICIES[names.get(path.stem, path.stem)]["digest"]
    )


# decisions


@pytest.mark.parametrize("case", DECISIONS["cases"], ids=lambda case: case["trace"])
def test_the_same_decisions(case: dict[str, Any]) -> None:
    trace = case["trace"]
    if trace.startswith("shared:"):
        if not SHARED.is_dir():
            pytest.skip(needs_shared.kwargs["reason"])
        source = SHARED / "workloads" / f"{trace.removeprefix('shared:')}.jsonl"
        trace = "cut.jsonl"
        assert (
            zlab("trace", "cut", str(source), trace, "--first", str(case["first"])).exit_code == 0
        )
    document = shown(
        "compare", trace, *each("--policy", case["policies"]), *case["room"], "--jobs", "1"
    )
    runs = [row["runs"][0] for row in document["policies"]]
    assert {run["workload_sha256"] for run in runs} == {case["workload_sha256"]}
    found = dict(zip(case["policies"], (run["digest"] for run in runs), strict=True))
    assert found == dict(zip(case["policies"], case["digests"], strict=True))


@pytest.mark.parametrize(
    "case", DECISIONS["changes"], ids=lambda case: " ".join((case["policy"], *case["changes"]))
)
def test_the_same_decisions_across_changes(case: dict[str, Any]) -> None:
    changes = each("--change", case["changes"])
    assert (
        shown("replay", case["trace"], "--policy", case["policy"], *changes, *case["room"])[
            "digest"
        ]
        == (case["digest"])
    )


# recordings


@pytest.mark.parametrize("name", SIMULATED)
def test_a_recording_of_the_simulator(name: str) -> None:
    how = SIMULATED[name]
    found = Recording(Path("recordings") / name)
    named = [change.policy.name for change in read_changes(found.manifest)]
    assert named == [change.partition(":")[2] for change in how["changes"]]
    shown(
        "replay",
        how["trace"],
        "-p",
        how["policy"],
        *each("--change", how["changes"]),
        *how["room"],
        "--out",
        "new",
    )
    again = Recording(Path("new"))
    assert first_difference(found.table("events"), again.table("events")) is None
    assert found.table("blocks").equals(again.table("blocks"))
    for key in (
        "digest",
        "policy_digest",
        "policy_toml",
        "policy_changes",
        "workload_sha256",
        "limits",
        "num_steps",
    ):
        assert again.manifest[key] == found.manifest[key], key


@pytest.mark.parametrize(
    ("folder", "num_changes"), [("recordings/engine-changed", 3), ("live/live", 1)]
)
def test_a_recording_of_the_engine_is_decided_again(folder: str, num_changes: int) -> None:
    assert len(read_changes(Recording(Path(folder)).manifest)) == num_changes
    (verdict,) = shown("parity", "--recording", folder)["policies"]
    assert verdict["equal"], verdict
    assert verdict["engine_digest"] == Recording(Path(folder)).manifest["digest"]


def test_a_live_trace_and_a_trace_are_whole() -> None:
    for path, rows in (
        ("live/trace-00000.jsonl", 12),
        ("trace/mixed.jsonl", 120),
        ("trace/chat.jsonl.gz", None),
    ):
        result = zlab("trace", "check", path)
        assert result.exit_code == 0, errors(result)
        assert rows is None or shown("trace", "info", path)["meta"]["rows_kept"] == rows


# registry and evidence


def standings(registry: PolicyRegistry) -> list[dict[str, str]]:
    return [
        {
            "gpu": one.target.gpu, "model": one.target.model, "stage": str(one.stage),
            "name": one.policy.name, "digest": one.policy.digest,
        }
        for one in registry.standings()
    ]  # fmt: skip


def test_a_registry_is_read() -> None:
    registry = PolicyRegistry("registry.db")
    written = json.loads(Path("registry.json").read_text("utf-8"))
    assert standings(registry) == written["standings"]
    assert [
        {key: row[key] for key in written["changes"][0]} for row in shown(*HISTORY)["changes"]
    ] == (written["changes"])
    assert all(one.evidence is not None for one in registry.standings(HERE))


HISTORY = ("history", "--registry", "registry.db")


@pytest.mark.parametrize(
    ("target", "name"), [(HERE, HYBRID), (THERE, OWN)], ids=["preset", "own class"]
)
def test_the_live_policy_of_a_registry_decides(target: Target, name: str) -> None:
    """It is the one that was promoted, even where the file of its own class is gone."""
    Path("own_order.py").unlink()
    standing = PolicyRegistry("registry.db").live(target)
    assert standing is not None
    policy: Policy = standing.policy.load()
    assert policy.name == standing.policy.name == name
    assert policy_digest(policy) == standing.policy.digest
    assert standing.evidence is not None
    assert standing.evidence.passed


def test_a_registry_goes_on() -> None:
    """Back to what was live before, and forward once today's code has its own evidence."""
    common = ("--registry", "registry.db", "--who", "cyd")
    assert shown("rollback", *common)["name"] == "full-kv"
    waived = '[quality]\nrequired = false\nreason = "no model is evaluated here"\n'
    extent = '[evidence]\nrequests = 1\nrelative_gates = 0\nreason = "a small trace"\n'
    Path("gates.toml").write_text(f'[gates]\nlaws = "== ok"\n{waived}{extent}')
    room = ("--block-size", "16", "--kv-blocks", "36", "--host-blocks", "60", "--jobs", "1")
    little = SIMULATED["sim-plain"]["trace"]
    for spec in (HYBRID, OWN):
        shown("validate", spec, "--trace", little, "--gates", "gates.toml", *room, *common)
        promoted = shown("promote", spec, *common)
        assert (promoted["name"], promoted["to_stage"], promoted["forced"]) == (spec, "live", False)
    assert PolicyRegistry("registry.db").canary(THERE) is not None
    assert {one.stage for one in PolicyRegistry("registry.db").standings(HERE)} >= {
        DeploymentStage.LIVE,
        DeploymentStage.RETIRED,
    }


@pytest.mark.parametrize("name", ["full-kv", "hybrid", "own-class", "failed"])
def test_evidence_is_read(name: str) -> None:
    found = read_evidence(Path("evidence") / f"{name}.json")
    assert found.passed is (name != "failed")
    assert policy_digest(found.policy.load()) == found.policy.digest
    again = found.cases[0]
    if name == "failed":
        return
    room = SIMULATED["sim-plain"]["room"]
    assert (
        shown("replay", again.name, "--policy", found.policy.name, *room)["digest"]
        == again.digests[0]
    )


# costs


def test_measurements_are_fitted_to_the_profile_of_then() -> None:
    (path,) = Path("calibration").glob("cpu-*.json")
    written = load_profile(path)
    Path("fitted").mkdir()
    coefficients = shown("calibrate", "--from", "calibration/measurements.json", "--out", "fitted")[
        "coefficients"
    ]
    for name, value in written.coefficients.items():
        assert coefficients[name]["value"] == pytest.approx(value, rel=1e-3, abs=1e-12), name


def test_a_measured_profile_prices_a_run() -> None:
    written = json.loads(Path("calibration/priced.json").read_text("utf-8"))
    found = shown(*written["arguments"])
    assert (found["digest"], found["compressions"]) == (written["digest"], written["compressions"])
    assert found["makespan_s"] == pytest.approx(written["makespan_s"], rel=1e-6)
