"""The registry: who may serve where, how it goes back, and what a change that concerns a server
leaves behind.

Two processes at once: one wins, the other is told. A process killed anywhere: the registry is
whole.
"""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.house_source import ROOT
from tests.policies.records import HERE, record, stored
from zlab.policies import registry as registry_changes
from zlab.policies.evidence import EvidenceError, Target
from zlab.policies.registry import (
    ChangeState,
    DeploymentStage,
    PolicyRegistry,
    RegistryError,
    StageChange,
)

HYBRID, FULL, SMALL = stored("hybrid"), stored("full-kv"), stored("hybrid:budget.tokens=1024")
THERE = Target("qwen3-8b", "h100")
URL = "http://127.0.0.1:1"


@pytest.fixture
def registry(tmp_path: Path) -> PolicyRegistry:
    """A registry in which three policies are validated here."""
    made = PolicyRegistry(tmp_path / "registry.db")
    for policy in (HYBRID, FULL, SMALL):
        made.add_evidence(record(policy), "ann")
    return made


def stages(registry: PolicyRegistry, target: Target = HERE) -> dict[str, DeploymentStage]:
    """Where each policy stands."""
    return {one.policy.name: one.stage for one in registry.standings(target)}


def test_from_candidate_to_retired(tmp_path: Path) -> None:
    registry = PolicyRegistry(tmp_path / "registry.db")
    assert registry.live(HERE) is None
    failed = registry.add_evidence(record(HYBRID, speed=9.0), "ann", "first try")
    assert failed.stage is DeploymentStage.CANDIDATE
    passed = record(HYBRID)
    assert registry.add_evidence(passed, "ann").stage is DeploymentStage.VALIDATED
    assert (
        registry.promote(HYBRID, DeploymentStage.CANARY, HERE, "bob", "a tenth").stage
        is DeploymentStage.CANARY
    )
    live = registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob", "it held")
    assert live.stage is DeploymentStage.LIVE
    assert live.evidence == passed
    assert registry.canary(HERE) is None
    registry.add_evidence(record(FULL), "ann")
    registry.promote(FULL, DeploymentStage.LIVE, HERE, "bob")
    assert stages(registry) == {"hybrid": DeploymentStage.RETIRED, "full-kv": DeploymentStage.LIVE}
    rows = [
        (c.action, c.name, c.from_stage, c.to_stage, c.who, c.why, c.evidence)
        for c in registry.history(HERE)
    ]
    assert rows[:4] == [
        ("validate", "hybrid", None, "candidate", "ann", "first try", record(HYBRID, speed=9.0).id),
        ("validate", "hybrid", "candidate", "validated", "ann", "", passed.id),
        ("promote", "hybrid", "validated", "canary", "bob", "a tenth", passed.id),
        ("promote", "hybrid", "canary", "live", "bob", "it held", passed.id),
    ]
    json.dumps([change.as_dict() for change in registry.history()])


def test_a_policy_comes_back_as_it_was(registry: PolicyRegistry) -> None:
    registry.promote(SMALL, DeploymentStage.LIVE, HERE, "bob")
    standing = registry.live(HERE)
    assert standing is not None
    assert standing.policy == SMALL
    assert standing.policy.load().budget.floor(256) == 5
    assert standing.evidence is not None
    assert standing.evidence.policy == SMALL
    assert registry.policy(SMALL.digest) == SMALL
    assert registry.evidence(standing.evidence.id) == standing.evidence


def test_without_evidence_nothing_serves(registry: PolicyRegistry) -> None:
    other = stored("hybrid:join=blocking")
    with pytest.raises(
        RegistryError, match=r"cannot become live for .*: there is no evidence on policy"
    ):
        registry.promote(other, DeploymentStage.LIVE, HERE, "bob")
    with pytest.raises(RegistryError, match="it is for GPU h200, not h100"):
        registry.promote(HYBRID, DeploymentStage.CANARY, THERE, "bob")
    registry.add_evidence(record(HYBRID, speed=9.0), "ann")
    with pytest.raises(RegistryError, match=r"it did not pass: tokens_per_s >= 1\.5x"):
        registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    assert stages(registry)["hybrid"] is DeploymentStage.CANDIDATE
    assert registry.live(HERE) is None
    assert registry.standings(THERE) == []


def test_other_code_needs_other_evidence(
    registry: PolicyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlab.policies.registry.code_digest", lambda _: "f" * 64)
    with pytest.raises(RegistryError, match="then, ffffffffffff now"):
        registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    registry.add_evidence(record(HYBRID, code="f" * 64), "ann")
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")


def test_force_is_written_down(registry: PolicyRegistry) -> None:
    with pytest.raises(RegistryError, match="force needs a reason"):
        registry.promote(HYBRID, DeploymentStage.LIVE, THERE, "bob", force=True)
    forced = registry.promote(
        HYBRID, DeploymentStage.LIVE, THERE, "bob", "the pager rang", force=True
    )
    assert forced.change.forced
    assert forced.change.why == "the pager rang"
    assert forced.evidence == record(HYBRID)  # what there was, for another card
    assert not registry.promote(
        FULL, DeploymentStage.LIVE, HERE, "bob", "no need to", force=True
    ).change.forced
    unknown = stored("nano-vllm")
    assert (
        registry.promote(unknown, DeploymentStage.LIVE, HERE, "bob", "try", force=True).evidence
        is None
    )


def test_what_makes_no_sense(registry: PolicyRegistry) -> None:
    with pytest.raises(RegistryError, match="promoted to canary or live, not to validated"):
        registry.promote(HYBRID, DeploymentStage.VALIDATED, HERE, "bob")
    with pytest.raises(RegistryError, match="nothing is live for qwen3-8b on h200"):
        registry.rollback(HERE, "bob")
    with pytest.raises(RegistryError, match="a change needs a name"):
        registry.promote(HYBRID, DeploymentStage.LIVE, HERE, " ")
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    with pytest.raises(
        RegistryError, match=r"hybrid is live for .*, already \(change 4, promotion of hybrid"
    ):
        registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    with pytest.raises(RegistryError, match="a canary must be another policy"):
        registry.promote(HYBRID, DeploymentStage.CANARY, HERE, "bob")
    with pytest.raises(RegistryError, match="nothing is canary"):
        registry.rollback(HERE, "bob", stage=DeploymentStage.CANARY)
    with pytest.raises(RegistryError, match="hybrid is the first that went live"):
        registry.rollback(HERE, "bob")
    with pytest.raises(RegistryError, match="not what is retired"):
        registry.rollback(HERE, "bob", stage=DeploymentStage.RETIRED)


def test_rollback_goes_down_the_pile_and_never_in_circles(registry: PolicyRegistry) -> None:
    for policy in (HYBRID, FULL, SMALL):
        registry.promote(policy, DeploymentStage.LIVE, HERE, "bob")
    for name in ("full-kv", "hybrid"):
        back = registry.rollback(HERE, "watch", "p99_ttft <= 2 s: 9 s")
        assert (back.policy.name, back.stage, back.change.why) == (
            name,
            DeploymentStage.LIVE,
            "p99_ttft <= 2 s: 9 s",
        )
        assert back.evidence is not None
    with pytest.raises(RegistryError, match="the first that went live"):
        registry.rollback(HERE, "watch")
    registry.promote(SMALL, DeploymentStage.LIVE, HERE, "bob")
    assert registry.rollback(HERE, "bob").policy.name == "hybrid"


def test_a_rollback_never_brings_back_what_was_thrown_out(registry: PolicyRegistry) -> None:
    """Also not where it was live a second time below; a promotion that names it does."""
    for policy in (SMALL, FULL, HYBRID, FULL):
        registry.promote(policy, DeploymentStage.LIVE, HERE, "bob")
    assert registry.rollback(HERE, "watch", "a gate broke").policy.name == "hybrid"
    back = registry.before_live(HERE)
    assert back is not None
    assert back.name == SMALL.name
    assert registry.rollback(HERE, "bob").policy.name == SMALL.name
    registry.promote(FULL, DeploymentStage.LIVE, HERE, "bob", "after all")
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    assert registry.rollback(HERE, "bob").policy.name == "full-kv"


def test_a_rollback_is_refused_where_all_was_thrown_out(registry: PolicyRegistry) -> None:
    for policy in (FULL, HYBRID, FULL):
        registry.promote(policy, DeploymentStage.LIVE, HERE, "bob")
    assert registry.rollback(HERE, "watch", "a gate broke").policy.name == "hybrid"
    assert registry.before_live(HERE) is None
    with pytest.raises(RegistryError, match="has been rolled back since, full-kv the last"):
        registry.rollback(HERE, "bob")


def test_a_canary_ends_alone(registry: PolicyRegistry) -> None:
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    registry.promote(FULL, DeploymentStage.CANARY, HERE, "bob")
    registry.promote(SMALL, DeploymentStage.CANARY, HERE, "bob")
    assert stages(registry) == {
        "hybrid": DeploymentStage.LIVE,
        "full-kv": DeploymentStage.RETIRED,
        SMALL.name: DeploymentStage.CANARY,
    }
    gone = registry.rollback(HERE, "watch", "refused == 0: 3", DeploymentStage.CANARY)
    assert (gone.policy.name, gone.stage) == (SMALL.name, DeploymentStage.RETIRED)
    assert stages(registry)["hybrid"] is DeploymentStage.LIVE
    assert registry.canary(HERE) is None
    assert registry.history()[-1].lane is DeploymentStage.CANARY


def test_targets_do_not_meet(registry: PolicyRegistry) -> None:
    registry.add_evidence(record(FULL, THERE), "ann")
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    registry.promote(FULL, DeploymentStage.LIVE, THERE, "bob")
    assert stages(registry)["hybrid"] is DeploymentStage.LIVE
    assert stages(registry, THERE) == {"full-kv": DeploymentStage.LIVE}
    assert {change.target for change in registry.history(THERE)} == {THERE}


def test_whoever_looked_before_another_changed_it_is_told(registry: PolicyRegistry) -> None:
    seen = registry.newest(HERE)
    registry.add_evidence(record(HYBRID, speed=3000.0), "ann")  # changes nothing of what serves
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob", seen=seen)
    faster = r"somebody was faster: change 5, promotion of hybrid to live by bob"
    with pytest.raises(RegistryError, match=faster):
        registry.promote(FULL, DeploymentStage.LIVE, HERE, "eve", seen=seen)
    with pytest.raises(RegistryError, match=faster):
        registry.rollback(HERE, "eve", seen=seen)
    registry.promote(FULL, DeploymentStage.LIVE, HERE, "eve", seen=registry.newest(HERE))


def test_the_same_record_counts_once(registry: PolicyRegistry) -> None:
    before = registry.history()
    assert registry.add_evidence(record(HYBRID), "eve").stage is DeploymentStage.VALIDATED
    assert registry.history() == before
    assert registry.evidence_on(HYBRID) == [record(HYBRID)]


def test_evidence_on_what_serves_moves_nothing(registry: PolicyRegistry) -> None:
    first = registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    again = registry.add_evidence(record(HYBRID, speed=9.0), "ann", "yesterday's load")
    assert again.stage is DeploymentStage.LIVE
    assert again.evidence == first.evidence
    assert registry.history()[-1].why == "yesterday's load"


# in agreement with a server


def test_a_pending_change_holds_once_confirmed(registry: PolicyRegistry) -> None:
    registry.promote(FULL, DeploymentStage.LIVE, HERE, "bob")
    change = registry.begin_promotion(HYBRID, DeploymentStage.LIVE, HERE, "bob", "faster", URL)
    assert change.state is ChangeState.PENDING
    assert registry.pending(HERE) == change
    assert stages(registry)["full-kv"] is DeploymentStage.LIVE
    done = registry.confirm(change.number)
    assert done.state is ChangeState.DONE
    assert stages(registry)["hybrid"] is DeploymentStage.LIVE
    assert registry.pending(HERE) is None
    with pytest.raises(RegistryError, match="is not pending any more, it is done"):
        registry.undo(change.number, "too late")
    back = registry.begin_rollback(HERE, "bob", "slower", URL)
    assert (back.name, back.to_stage, back.lane) == (
        "full-kv",
        DeploymentStage.LIVE,
        DeploymentStage.LIVE,
    )
    registry.confirm(back.number)
    assert stages(registry)["full-kv"] is DeploymentStage.LIVE


def test_an_undone_change_leaves_its_reason_and_nothing_else(registry: PolicyRegistry) -> None:
    change = registry.begin_promotion(HYBRID, DeploymentStage.LIVE, HERE, "bob", "faster", URL)
    registry.undo(change.number, "the server said 503")
    assert registry.live(HERE) is None
    last = registry.history()[-1]
    assert (last.state, last.reason, last.url) == (ChangeState.UNDONE, "the server said 503", URL)
    with pytest.raises(RegistryError, match="it is undone: the server said 503"):
        registry.confirm(change.number)


def test_while_one_is_under_way_others_wait(registry: PolicyRegistry) -> None:
    registry.begin_promotion(HYBRID, DeploymentStage.LIVE, HERE, "bob", "faster", URL)
    waits = r"promotion of hybrid to live by bob at .*, is under way; try again"
    with pytest.raises(RegistryError, match=waits):
        registry.promote(FULL, DeploymentStage.LIVE, HERE, "eve", "now", force=True)
    with pytest.raises(RegistryError, match=waits):
        registry.begin_promotion(FULL, DeploymentStage.CANARY, HERE, "eve", "", URL)
    with pytest.raises(RegistryError, match=waits):
        registry.rollback(HERE, "watch")
    assert (
        registry.settle(HERE, None, "eve") is None
    )  # its process lives: it is not for others to say
    registry.add_evidence(record(FULL, THERE), "ann")
    registry.promote(FULL, DeploymentStage.LIVE, THERE, "eve")


def abandoned(
    registry: PolicyRegistry,
    monkeypatch: pytest.MonkeyPatch,
    stage: DeploymentStage = DeploymentStage.LIVE,
) -> StageChange:
    """A change whose process is gone."""
    monkeypatch.setattr(registry_changes, "PATIENCE_S", -1.0)
    change = registry.begin_promotion(HYBRID, stage, HERE, "bob", "faster", URL)
    monkeypatch.undo()
    assert change.is_abandoned
    return change


def test_an_abandoned_change_is_settled_by_what_the_server_runs(
    registry: PolicyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(registry, monkeypatch)
    with pytest.raises(RegistryError, match=f"was never finished; .* --live {URL} asks the server"):
        registry.promote(FULL, DeploymentStage.LIVE, HERE, "eve")
    undone = registry.settle(HERE, FULL.digest, "eve")
    assert undone is not None
    assert undone.state is ChangeState.UNDONE
    assert undone.reason == f"eve found it unfinished; the server runs policy {FULL.digest[:12]}"
    abandoned(registry, monkeypatch, DeploymentStage.CANARY)
    done = registry.settle(HERE, HYBRID.digest, "eve")
    assert done is not None
    assert done.state is ChangeState.DONE
    assert stages(registry)["hybrid"] is DeploymentStage.CANARY
    monkeypatch.setattr(registry_changes, "PATIENCE_S", -1.0)
    registry.begin_rollback(HERE, "bob", "", URL, DeploymentStage.CANARY)
    gone = registry.settle(HERE, None, "eve")
    assert gone is not None
    assert gone.state is ChangeState.DONE
    assert stages(registry)["hybrid"] is DeploymentStage.RETIRED


def test_force_takes_an_abandoned_change_as_not_done(
    registry: PolicyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = abandoned(registry, monkeypatch)
    registry.promote(FULL, DeploymentStage.LIVE, HERE, "eve", "the server burnt down", force=True)
    rows = {one.number: one for one in registry.history()}
    assert rows[change.number].state is ChangeState.UNDONE
    assert rows[change.number].reason == "taken as not done by eve: the server burnt down"


def test_a_change_of_another_host_is_waited_for(
    registry: PolicyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_changes, "this_process", lambda: "elsewhere:1")
    change = registry.begin_promotion(HYBRID, DeploymentStage.LIVE, HERE, "bob", "", URL)
    assert not change.is_abandoned
    later = time.time() + 61
    monkeypatch.setattr("zlab.policies.registry.time.time", lambda: later)
    assert change.is_abandoned


# the file


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"no registry at .*nix\.db"):
        PolicyRegistry(tmp_path / "nix.db", create=False)
    with pytest.raises(RegistryError, match="there is no folder"):
        PolicyRegistry(tmp_path / "nix" / "registry.db")
    text = tmp_path / "text.db"
    text.write_text("no database at all, but long enough to have a header of a hundred bytes " * 3)
    with pytest.raises(RegistryError, match="not a database"):
        PolicyRegistry(text)
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(RegistryError, match="another program's database"):
        PolicyRegistry(other)
    newer = tmp_path / "newer.db"
    PolicyRegistry(newer)
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(RegistryError, match="version 9 is not one this version reads"):
        PolicyRegistry(newer)


def test_what_was_changed_in_the_file_is_noticed(registry: PolicyRegistry, tmp_path: Path) -> None:
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    connection = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="evidence is never changed"):
        connection.execute("UPDATE evidence SET content = replace(content, '2000.0', '9000.0')")
    connection.execute("DROP TRIGGER evidence_is_final")
    connection.execute("UPDATE evidence SET content = replace(content, '2000.0', '9000.0')")
    with pytest.raises(EvidenceError, match="was changed after it was made"):
        registry.live(HERE)
    connection.execute("UPDATE policy SET toml = replace(toml, '2048', '1024')")
    with pytest.raises(RegistryError, match="is not what it was"):
        registry.policy(HYBRID.digest)
    connection.close()


def test_a_writer_that_stays_is_named(
    registry: PolicyRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlab.policies.registry.BUSY_S", 0.05)
    other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RegistryError, match="another process has been writing"):
        registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")
    assert registry.live(HERE) is None  # readers do not wait
    other.execute("ROLLBACK")
    other.close()
    registry.promote(HYBRID, DeploymentStage.LIVE, HERE, "bob")


ROUNDS = 6
NUM_KILLS = 30


def start(*arguments: str) -> "subprocess.Popen[str]":
    """A process of `registry_process`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.policies.registry_process", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hear(process: "subprocess.Popen[str]") -> str:
    """The next line that it says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(processes: "list[subprocess.Popen[str]]") -> None:
    """Let all go on at once."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_of_two_at_once_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    racers = [start("race", str(tmp_path), str(ROUNDS), name) for name in ("hybrid", "full-kv")]
    for number in range(ROUNDS):
        assert [hear(racer) for racer in racers] == ["ready", "ready"], [
            racer.communicate() for racer in racers
        ]
        go(racers)  # the file is made by both at once
        assert [hear(racer) for racer in racers] == ["looked", "looked"], [
            racer.communicate() for racer in racers
        ]
        go(racers)
        said = [hear(racer) for racer in racers]
        assert said.count("won") == 1, said
        (loser,) = [words for words in said if words != "won"]
        winner = ("hybrid", "full-kv")[said.index("won")]
        assert f"somebody was faster: change 1, promotion of {winner} to live by {winner}" in loser
        registry = PolicyRegistry(tmp_path / f"{number}.db", create=False)
        live = registry.live(HERE)
        assert live is not None
        assert live.policy.name == winner
        assert [one.stage for one in registry.standings()] == [DeploymentStage.LIVE]
    for racer in racers:
        _, errors = racer.communicate(timeout=300)
        assert racer.returncode == 0, errors


def test_a_process_killed_anywhere_leaves_a_whole_registry(tmp_path: Path) -> None:
    process = start("kills", str(tmp_path / "registry.db"), str(NUM_KILLS), "7")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    num_changes, _ = map(int, said.split())
    assert num_changes >= NUM_KILLS, "the workers came to do something"
