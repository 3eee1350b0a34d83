"""`zlab promote | rollback | history | diff`: what serves, what is refused, and registry and server
in agreement.
"""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.house_source import ROOT
from tests.policies.records import HERE, record, stored
from tests.zlab.command_line import PATIENCE_S, errors, start, zlab
from tests.zlab.policy_server import KEY, PolicyServer, policy_server
from zlab.cli import registry as agreement
from zlab.cli.client import KEY_NAME
from zlab.policies.evidence import write_evidence
from zlab.policies.gates import EvidenceMinimum, gates_from_list
from zlab.policies.registry import ChangeState, DeploymentStage, PolicyRegistry

HYBRID, FULL = stored("hybrid"), stored("full-kv")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry in which hybrid and full-kv are validated."""
    made = tmp_path / "registry.db"
    registry = PolicyRegistry(made)
    for policy in (HYBRID, FULL):
        registry.add_evidence(record(policy), "ann")
    monkeypatch.setenv("ZLAB_REGISTRY", str(made))
    monkeypatch.setenv(KEY_NAME, KEY)
    monkeypatch.setattr(agreement, "ASK_AGAIN_S", (0.0, 0.01))
    return made


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    """A server to talk to."""
    with policy_server() as state:
        yield state


def ok(*arguments: str) -> str:
    """What a command that goes well says."""
    result = zlab(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*arguments: str, code: int = 1) -> str:
    """What a command says that does not go well."""
    result = zlab(*arguments)
    assert result.exit_code == code, result.stdout
    assert result.stdout == ""
    return errors(result)


def live(path: Path) -> str | None:
    """Name of what is live."""
    standing = PolicyRegistry(path).live(HERE)
    return standing.policy.name if standing else None


def test_the_way_up_and_back(path: Path) -> None:
    said = ok("promote", "full-kv", "--who", "bob", "--why", "first")
    assert said.startswith("full-kv is live for qwen3-8b on h200: change 3 by bob, evidence ")
    assert "hybrid is canary for qwen3-8b on h200: change 4" in ok(
        "promote", "hybrid", "--to", "canary"
    )
    assert "hybrid is live for qwen3-8b on h200 instead of full-kv" in ok("promote", "hybrid")
    assert "full-kv is live for qwen3-8b on h200 instead of hybrid" in ok(
        "rollback", "--why", "slow"
    )
    assert "full-kv is the first that went live" in refused("rollback")
    ok("promote", "hybrid", "--to", "canary")
    assert "hybrid is no canary any more" in ok("rollback", "--of", "canary", "--why", "no gain")
    document = json.loads(ok("history", "--json"))
    assert [row["to_stage"] for row in document["changes"]][2:] == [
        "live", "canary", "live", "live", "canary", "retired",
    ]  # fmt: skip
    assert {row["policy"]["name"]: row["stage"] for row in document["standings"]} == {
        "full-kv": "live",
        "hybrid": "retired",
    }
    table = " ".join(ok("history").split())
    assert "full-kv: retired -> live (rollback) for qwen3-8b on h200" in table
    assert "no gain" in table
    assert json.loads(ok("history", "--json", "--gpu", "h100")) == {"standings": [], "changes": []}


def test_refused_with_what_is_missing(path: Path, tmp_path: Path) -> None:
    assert "there is no evidence on policy" in refused("promote", "nano-vllm")
    assert "it is for GPU h200, not h100" in refused("promote", "hybrid", "--gpu", "h100")
    assert "it is for model qwen3-8b, not qwen3-4b" in refused(
        "promote", "hybrid", "--model", "qwen3-4b"
    )
    PolicyRegistry(path).add_evidence(record(HYBRID, speed=9.0), "ann")
    assert "it did not pass: tokens_per_s >= 1.5x (synth:amc23 seed 0)" in refused(
        "promote", "hybrid"
    )
    evidence = tmp_path / "evidence.json"
    write_evidence(record(HYBRID, made_at="2026-11-30T00:00:00Z"), evidence)
    ok("promote", "hybrid", "--evidence", str(evidence))
    evidence.write_text(evidence.read_text("utf-8").replace("2000.0", "9000.0"), "utf-8")
    assert "was changed after it was made" in refused(
        "promote", "full-kv", "--evidence", str(evidence)
    )
    assert live(path) == "hybrid"


def test_evidence_of_too_little_is_refused(path: Path) -> None:
    registry = PolicyRegistry(path)
    registry.add_evidence(record(HYBRID, finished=49.0), "ann")
    assert "it rests on 98 requests, at least 100 are asked" in refused("promote", "hybrid")
    alone = gates_from_list(["laws == ok"])
    registry.add_evidence(record(HYBRID, gates=alone), "ann")
    assert "it has 0 gates relative to a baseline" in refused("promote", "hybrid")
    fewer = replace(alone, minimum=EvidenceMinimum(8, 0, "a toy"))
    registry.add_evidence(record(HYBRID, finished=4.0, gates=fewer), "ann")
    said = ok("promote", "hybrid")
    assert "judged on 8 requests of synth:amc23 seed 0, synth:amc23 seed 1, 1 gates" in said
    assert "fewer are enough: a toy" in said


def test_force_needs_a_reason_and_is_kept(path: Path) -> None:
    assert "--force needs --why" in refused("promote", "nano-vllm", "--force", code=2)
    assert "--force needs --why" in refused("rollback", "--force", code=2)
    said = ok("promote", "nano-vllm", "--force", "--why", "the pager rang")
    assert "FORCED, no evidence" in said
    assert "FORCED" in ok("history")


def test_data_says_nothing_to_the_terminal(path: Path) -> None:
    """No escape sequence and no emoji from a name or a reason."""
    said = ok("promote", "hybrid", "--who", "eve\x1b[31m", "--why", "a\x1b]0;title\x07 :smile:\nb")
    shown = ok("history")
    assert "\x1b" not in said + shown
    assert "\x07" not in shown
    assert "eve\\x1b[31m" in said
    assert ":smile:" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("promote", "hybrd"), "did you mean 'hybrid'?"),
        (("promote", "hybrid", "--to", "retired"), "'retired' is not one of 'canary', 'live'"),
        (("promote", "hybrid", "--gpu", "h20"), "did you mean 'h200'?"),
        (("promote", "hybrid", "--who", ""), "--who needs a name"),
        (
            ("promote", "hybrid", "--live", "127.0.0.1:8000"),
            "must be an address as http://127.0.0.1:8000",
        ),
        (
            ("promote", "hybrid", "--live", "localhost:8000"),
            "must be an address as http://127.0.0.1:8000",
        ),
        (("rollback", "--live", "localhost:8000"), "--live localhost:8000: must be an address"),
        (("promote", "hybrid", "--live", "http://me:secret@x"), "no key in the address"),
        (("promote", "hybrid", "--live", "http://me:secret@x?y"), "no key in the address"),
        (("promote", "hybrid", "--live", "me:secret@x:8000"), "no key in the address"),
        (("promote", "hybrid", "--live", "http://me:secret@[x"), "no key in the address"),
        (("promote", "hybrid", "--live", "http://me:secret@x:99999"), "no key in the address"),
        (("promote", "hybrid", "--live", "http://[::1"), "--live http://[::1: Invalid IPv6 URL"),
        (("promote", "hybrid", "--live", "http://x:99999"), "Port out of range"),
        (("promote", "hybrid", "--evidence", "nix.json"), "'nix.json' does not exist"),
        (("rollback", "--of", "validated"), "is not one of 'canary', 'live'"),
        (("diff", "hybrid"), "nothing is live for qwen3-8b on h200: name two policies"),
        (("diff", "hybrid", "full-k"), "did you mean 'full-kv'?"),
        (("history", "--gpu", "h20"), "did you mean 'h200'?"),
    ],
)
def test_misuse(
    path: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without an admin key: what is wrong with an address is said before one is asked for."""
    for _ in range(2):
        said = refused(*arguments, code=2)
        assert words in said
        assert "secret" not in said
        monkeypatch.delenv(KEY_NAME, raising=False)


def test_without_a_registry(tmp_path: Path) -> None:
    nowhere = ("--registry", str(tmp_path / "nix.db"))
    for command in (("promote", "hybrid"), ("rollback",), ("history",), ("diff", "hybrid", "live")):
        assert "no registry at" in refused(*command, *nowhere, code=2)
    lost = ("--registry", str(tmp_path / "no" / "r.db"), "--force", "--why", "x")
    assert "there is no folder" in refused("promote", "hybrid", *lost, code=2)
    assert list(tmp_path.iterdir()) == []


def test_two_policies_side_by_side(path: Path, tmp_path: Path) -> None:
    ok("promote", "full-kv")
    document = json.loads(ok("diff", "hybrid:budget.tokens=1024", "hybrid", "--json"))
    assert document["answers"] == {
        "budget": ["fixed tokens=1024 blocks=0", "fixed tokens=2048 blocks=0"]
    }
    assert "-tokens = 1024" in document["text"]
    beside = json.loads(ok("diff", "hybrid", "--json"))
    assert [policy["name"] for policy in beside["policies"]] == ["hybrid", "full-kv"]
    assert beside["figures"]["tokens_per_s"] == [[2000.0, 2001.0], [2000.0, 2001.0]]
    assert beside["same_workloads"]
    shown = ok("diff", "hybrid")
    assert "2,000 /s .. 2,001 /s" in shown
    assert '+kind = "unlimited"' in shown
    assert "decide the same" in ok("diff", "full-kv")
    mine = tmp_path / "mine.py"
    shutil.copy(ROOT / "docs" / "examples" / "fewest_left.py", mine)
    PolicyRegistry(path).promote(
        stored(f"{mine}:FewestLeft"), DeploymentStage.LIVE, HERE, "bob", "try", force=True
    )
    mine.write_text(mine.read_text("utf-8").replace("lookahead = 4", "lookahead = 5"), "utf-8")
    own = json.loads(ok("diff", f"{mine}:FewestLeft", "--json"))
    assert list(own["answers"]) == ["order"]
    assert any(line.startswith("-    lookahead = 5") for line in own["text"])
    assert any(line.startswith("+    lookahead = 4") for line in own["text"])


# with a server


def test_the_server_changes_over_and_the_registry_holds_it(
    path: Path, server: PolicyServer
) -> None:
    at = ("--live", server.url)
    assert f"full-kv is live for qwen3-8b on h200 at {server.url}: change 3" in ok(
        "promote", "full-kv", *at
    )
    ok("promote", "hybrid", "--to", "canary", "--who", "bob", "--why", "a tenth", *at)
    assert server.lanes == {"live": FULL.digest, "canary": HYBRID.digest}
    post = server.posts[1]
    assert (post["lane"], post["policy"], post["who"], post["why"]) == (
        "canary",
        HYBRID.toml,
        "bob",
        "a tenth",
    )
    assert (post["digest"], post["evidence"], post["change"]) == (
        HYBRID.digest,
        record(HYBRID).id,
        4,
    )
    ok("rollback", "--of", "canary", *at)
    assert server.posts[2]["policy"] is None
    assert server.lanes == {"live": FULL.digest, "canary": FULL.digest}
    ok("promote", "hybrid", *at)
    ok("rollback", *at)
    assert server.lanes["live"] == FULL.digest
    assert live(path) == "full-kv"
    assert {change.state for change in PolicyRegistry(path).history()} == {ChangeState.DONE}


def test_the_server_learns_in_what_setup_a_policy_was_judged(
    path: Path, server: PolicyServer
) -> None:
    """Not so when the change is forced, which the history shows, nor when it goes back."""
    ok("promote", "full-kv", "--force", "--why", "this card is alike", "--live", server.url)
    ok("promote", "hybrid", "--live", server.url)
    ok("rollback", "--live", server.url)
    limits = {"num_blocks": 3035, "block_size": 256}
    judged = {"gpu": "h200", "model": "qwen3-8b", **limits}
    assert [post.get("setup") for post in server.posts] == [None, judged, None]
    assert [change.forced for change in PolicyRegistry(path).history()][2:] == [True, False, False]


def test_an_own_policy_goes_with_its_source(
    path: Path, server: PolicyServer, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    shutil.copy(ROOT / "docs" / "examples" / "fewest_left.py", mine)
    ok("promote", f"{mine}:FewestLeft", "--force", "--why", "try", "--live", server.url)
    assert server.posts[0]["sources"] == {f"{mine}:FewestLeft": mine.read_text("utf-8")}


def test_what_the_server_refuses_does_not_hold(path: Path, server: PolicyServer) -> None:
    server.mode = "refuse"
    said = refused("promote", "hybrid", "--live", server.url)
    assert (
        "answered with 409: a budget of 9 blocks does not fit; nothing was changed (change 3 "
        "is undone)" in said
    )
    assert live(path) is None
    last = PolicyRegistry(path).history()[-1]
    assert last.state is ChangeState.UNDONE
    assert "a budget of 9 blocks does not fit" in last.reason
    assert "UNDONE" in ok("history")
    server.mode = "agree"
    ok("promote", "hybrid", "--live", server.url)


def test_the_key_goes_nowhere_else(
    path: Path, server: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("promote", "hybrid", "--live", server.url)
    server.mode = "move"
    assert "answered with 307" in refused(*at)
    assert not server.elsewhere
    monkeypatch.setenv(KEY_NAME, "another")
    assert "answered with 401: no such key" in refused(*at)
    monkeypatch.setenv(KEY_NAME, "two words")
    assert "must be one word" in refused(*at, code=2)
    monkeypatch.delenv(KEY_NAME)
    assert f"set ${KEY_NAME} or give --admin-key-file FILE" in refused(*at, code=2)
    keys = tmp_path / "key"
    keys.write_text("\n")
    assert "is empty" in refused(*at, "--admin-key-file", str(keys), code=2)
    keys.write_text(KEY + "\n")
    server.mode = "agree"
    ok(*at, "--admin-key-file", str(keys))
    assert KEY not in path.read_bytes().decode("latin-1")


def test_a_server_that_is_not_there(path: Path) -> None:
    with policy_server() as gone:
        url = gone.url
    before = PolicyRegistry(path).history()
    assert "cannot be reached" in refused("promote", "hybrid", "--live", url)
    assert PolicyRegistry(path).history() == before


def test_a_server_that_runs_something_else_is_told(path: Path, server: PolicyServer) -> None:
    ok("promote", "hybrid")
    result = zlab("rollback", "--of", "canary", "--live", server.url)
    assert "runs policy 000000000000, the registry has hybrid" in errors(result)
    assert f"hybrid is live for {HERE} at" not in result.stdout
    before = PolicyRegistry(path).history()
    assert "hybrid is live for qwen3-8b on h200" in ok("promote", "hybrid", "--live", server.url)
    assert server.lanes["live"] == HYBRID.digest
    assert PolicyRegistry(path).history() == before
    assert "already" in refused("promote", "hybrid", "--live", server.url)


def test_a_lost_answer_is_asked_after(path: Path, server: PolicyServer) -> None:
    server.mode = "mute"
    ok("promote", "hybrid", "--live", server.url)
    assert live(path) == "hybrid"


@pytest.mark.parametrize("mode", ["deaf", "lost", "other", "gateway"])
def test_nobody_knows_is_said_and_stays_pending(
    path: Path, server: PolicyServer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("promote", "full-kv", "--live", server.url)
    server.mode = mode
    monkeypatch.setattr("zlab.policies.registry.PATIENCE_S", -1.0)
    said = refused("promote", "hybrid", "--live", server.url)
    assert "Nobody knows whether the server took change 4: it stays pending" in said
    waiting = PolicyRegistry(path).pending(HERE)
    assert waiting is not None
    assert live(path) == "full-kv"
    assert "PENDING" in ok("history")
    monkeypatch.undo()
    monkeypatch.setenv("ZLAB_REGISTRY", str(path))
    monkeypatch.setenv(KEY_NAME, KEY)
    assert (
        f"was never finished; `zlab promote` or `zlab rollback` with --live {server.url}"
        in refused("rollback")
    )
    assert "name that server by --live" in refused(
        "rollback", "--live", server.url.replace("127.0.0.1", "localhost")
    )
    server.mode = "agree"
    result = zlab("promote", "hybrid", "--live", server.url, "--why", "again")
    assert result.exit_code == 0, result.stderr
    assert "change 4, promotion of hybrid to live" in result.stderr
    assert "was left unfinished and is undone now" in result.stderr
    assert live(path) == "hybrid"
    assert server.lanes["live"] == HYBRID.digest


def test_killed_while_the_server_works_on_it(path: Path, server: PolicyServer) -> None:
    """Kill -9 between registry and server: nothing is half promoted, and the next one finds out
    what the server did.
    """
    server.mode = "hold"
    for takes_it in (False, True):
        process = start(["promote", "hybrid", "--live", server.url])
        while not server.asked.wait(0.05):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        assert live(path) is None
        waiting = PolicyRegistry(path).pending(HERE)
        assert waiting is not None
        assert waiting.is_abandoned
        server.lanes["live"] = HYBRID.digest if takes_it else FULL.digest
        server.asked.clear()
        settled = PolicyRegistry(path).settle(HERE, server.lanes["live"], "eve")
        assert settled is not None
        assert settled.state is (ChangeState.DONE if takes_it else ChangeState.UNDONE)
    assert live(path) == "hybrid"
