"""`zlab validate`: cases, gates, evidence, what breaks, and what is refused at the door."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house_source import ROOT
from tests.policies.planted import release_forgets_a_block
from tests.zlab.command_line import SMALL, errors, zlab
from zlab.cli import validate as engine_check
from zlab.cli.parity import ParityVerdict
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import Target, read_evidence
from zlab.policies.registry import DeploymentStage, PolicyRegistry
from zlab.policies.spec import load_policy, policy_digest
from zlab.sim.sweep import results

HERE = Target("qwen3-8b", "h200")
POOL = ("--kv-blocks", "60", "--jobs", "1")
EASY = 'tokens_per_s = ">= 0.9x"\np99_ttft = "<= 60 s"\nrefused = "== 0"\nlaws = "== ok"\n'
OTHER = "synth:fixed?num_requests=12&prompt=600&output=300&rate_per_s=4"

EXTENT = '[evidence]\nrequests = 1\nreason = "small traces"\n'


@pytest.fixture
def gates(tmp_path: Path) -> str:
    """Gates that are easy to pass."""
    return written(tmp_path, EASY + EXTENT)


def written(folder: Path, lines: str) -> str:
    """A gates file."""
    path = folder / "gates.toml"
    path.write_text(f"[gates]\n{lines}", "utf-8")
    return str(path)


def test_every_case_is_measured_and_the_evidence_kept(gates: str, tmp_path: Path) -> None:
    out, registry = tmp_path / "evidence.json", tmp_path / "registry.db"
    traces = (
        "--trace",
        SMALL,
        "--trace",
        OTHER,
        "--seeds",
        "2",
        "--against",
        "full-kv",
        "--gates",
        gates,
    )
    kept = ("--out", str(out), "--registry", str(registry), "--who", "ann", "--why", "weekly")
    result = zlab("validate", "hybrid:budget.tokens=1024", *traces, *POOL, *kept)
    assert result.exit_code == 0, result.stderr
    evidence = read_evidence(out)
    assert (
        f"PASSED: evidence {evidence.id[:12]}, in {out} and in {registry}"
        in result.stdout.replace("\n", " ")
    )
    assert [(case.name, case.seed) for case in evidence.cases] == [
        (SMALL, 0),
        (SMALL, 1),
        (OTHER, 0),
        (OTHER, 1),
    ]
    assert len({case.workload_sha256 for case in evidence.cases}) == 4
    for case in evidence.cases:
        assert case.measured["laws"] == "ok"
        assert case.baseline is not None
        assert None not in case.digests
    assert evidence.cases[0].measured != evidence.cases[0].baseline
    assert evidence.target == HERE
    assert evidence.policy.digest == policy_digest(load_policy("hybrid:budget.tokens=1024"))
    content = evidence.content
    assert content["setup"]["limits"]["num_blocks"] == 60
    assert content["setup"]["cost"]["source"] == "roofline"
    assert content["against"]["digest"] == policy_digest(load_policy("full-kv"))
    assert content["made_by"] == "ann"
    standing = PolicyRegistry(registry, create=False).standings()[0]
    assert standing.stage is DeploymentStage.VALIDATED
    assert standing.evidence == evidence
    assert standing.change.why == "weekly"


def test_each_policy_is_read_once(gates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counting(spec: str) -> Policy:
        read.append(spec)
        return load_policy(spec)

    for name, module in list(sys.modules.items()):
        if name.startswith("zlab.") and getattr(module, "load_policy", None) is load_policy:
            monkeypatch.setattr(module, "load_policy", counting)
    against = ("--against", "full-kv", "--gates", gates, "--jobs", "1")
    result = zlab("validate", "hybrid", "--trace", SMALL, "--seeds", "2", *against)
    assert result.exit_code == 0, result.stderr
    assert sorted(read) == ["full-kv", "hybrid"]


def test_the_worst_case_decides_and_the_table_says_which(tmp_path: Path) -> None:
    registry = tmp_path / "registry.db"
    plain = ("validate", "full-kv", "-t", SMALL, "--seeds", "2", *POOL)
    easy = json.loads(
        zlab(*plain, "--gates", written(tmp_path, EASY.replace("0.9x", "1")), "--json").stdout
    )
    speeds = [case["measured"]["tokens_per_s"] for case in easy["cases"]]
    between = sum(speeds) / 2
    gates = written(tmp_path, f'tokens_per_s = ">= {between}"\nlaws = "== ok"\n')
    result = zlab(*plain, "--gates", gates, "--registry", str(registry))
    assert result.exit_code == 1
    assert f"error: full-kv did not pass: tokens_per_s >= {between}" in result.stderr
    (row,) = [line for line in result.stdout.splitlines() if "BROKEN" in line]
    assert row.split()[-1] == str(1 + speeds.index(min(speeds)))
    assert "FAILED: evidence " in result.stdout
    assert PolicyRegistry(registry, create=False).standings()[0].stage is DeploymentStage.CANDIDATE


def test_json_is_the_record(gates: str) -> None:
    result = zlab(
        "validate", "hybrid", "-t", SMALL, "--against", "full-kv", "--gates", gates, *POOL, "--json"
    )
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passed"]
    assert [row["state"] for row in document["judged"]] == ["passed"] * 4
    assert document["judged"][0]["limit"] == 0.9 * document["cases"][0]["baseline"]["tokens_per_s"]


def test_an_own_policy_is_covered_by_its_source(gates: str, tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "evidence.json"
    shutil.copy(ROOT / "docs" / "examples" / "fewest_left.py", mine)
    arguments = ("-t", SMALL, "--against", "hybrid", "--gates", gates, *POOL, "--out", str(out))
    assert zlab("validate", f"{mine}:FewestLeft", *arguments).exit_code == 0
    evidence = read_evidence(out)
    assert evidence.policy.sources == {f"{mine}:FewestLeft": mine.read_text("utf-8")}
    mine.write_text(mine.read_text("utf-8") + "\n# changed\n", "utf-8")
    registry = ("--registry", str(tmp_path / "registry.db"))
    refused = zlab("promote", f"{mine}:FewestLeft", "--evidence", str(out), *registry)
    assert refused.exit_code == 1
    assert f"it is about policy {evidence.policy.digest[:12]}" in errors(refused)


def test_a_policy_that_raises_fails_with_its_words(gates: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        'class Mine:\n    question = "order"\n    lookahead = max_skips = 0\n    fair_by_session '
        "= False\n"
        '    def key(self, request, history):\n        raise ValueError("no rank for " + '
        "request.id)\n",
        "utf-8",
    )
    result = zlab(
        "validate", f"{mine}:Mine", "-t", SMALL, "--against", "full-kv", "--gates", gates, *POOL
    )
    assert result.exit_code == 1
    # The table folds a long path anywhere, so compare without white space.
    assert "ValueError:norankfor" in "".join(result.stdout.split())
    assert result.stdout.count("not measured") == 4


def test_a_scorer_that_no_engine_has_is_refused_before_anything_is_measured(
    gates: str, tmp_path: Path
) -> None:
    registry = tmp_path / "registry.db"
    name = "hybrid:scorer=nonsense"
    arguments = (
        "-t",
        SMALL,
        "--against",
        "full-kv",
        "--gates",
        gates,
        *POOL,
        "--registry",
        str(registry),
    )
    measured = zlab("validate", name, *arguments)
    promoted = zlab("promote", name, "--to", "live", "--registry", str(registry))
    for result in (measured, promoted):
        assert result.exit_code == 2
        assert "unknown scorer 'nonsense' (choices: attention, " in errors(result)
    assert not registry.exists() or not PolicyRegistry(registry, create=False).standings()


def test_a_broken_law_is_named(gates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release_forgets_a_block(monkeypatch)
    result = zlab(
        "validate", "full-kv", "-t", SMALL, "--against", "full-kv", "--gates", gates, *POOL
    )
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "an invariant was broken: " in words
    assert "tables hold it" in words


def test_cases_come_in_order_from_several_processes(gates: str) -> None:
    arguments = (
        "validate",
        "hybrid",
        "-t",
        SMALL,
        "--seeds",
        "2",
        "--against",
        "full-kv",
        "--gates",
        gates,
        "--json",
    )
    alone = json.loads(zlab(*arguments, *POOL).stdout)
    spread = json.loads(zlab(*arguments, *POOL[:-1], "2").stdout)
    assert spread["cases"] == alone["cases"]
    assert list(results(str, [1, 2])) == [(0, "1"), (1, "2")]


def test_the_engine_is_asked_too(gates: str, tmp_path: Path) -> None:
    out = tmp_path / "evidence.json"
    arguments = (
        "validate",
        "full-kv",
        "-t",
        SMALL,
        "--against",
        "full-kv",
        "--gates",
        gates,
        *POOL,
        "--engine",
    )
    assert zlab(*arguments, "--out", str(out), "--device", "cpu").exit_code == 0
    evidence = read_evidence(out)
    assert evidence.gates.as_list()[-1] == "engine == ok"
    assert evidence.cases[0].measured["engine"] == "ok"
    (run,) = evidence.content["engine"]
    assert run["equal"]
    assert run["engine_digest"] == run["simulator_digest"]
    assert run["model"] == "dummy:tiny"
    assert run["preemptions"] > 0


@pytest.mark.parametrize(
    ("digest", "failed", "words"),
    [
        ("x", 0, "the engine decides otherwise under full-kv"),
        ("a", 2, "2 requests failed under full-kv"),
    ],
)
def test_an_engine_that_does_otherwise_is_no_evidence(
    gates: str, monkeypatch: pytest.MonkeyPatch, digest: str, failed: int, words: str
) -> None:
    def both(*_: Any) -> list[ParityVerdict]:
        return [ParityVerdict("full-kv", "a", digest, {"failed": failed}, None, ([], []))]

    monkeypatch.setattr(engine_check, "decided_by_both", both)
    result = zlab(
        "validate",
        "full-kv",
        "-t",
        SMALL,
        "--against",
        "full-kv",
        "--gates",
        gates,
        *POOL,
        "--engine",
    )
    assert result.exit_code == 1
    assert "did not pass: engine == ok" in errors(result)
    assert words in " ".join(result.stdout.split())


def test_a_budget_is_cut_so_that_the_engine_compresses() -> None:
    (whole, roomy), (cut, _) = engine_check._variants(load_policy("hybrid"))
    assert whole == load_policy("hybrid")
    assert roomy >= 2 * (whole.budget.floor(engine_check.BLOCK_SIZE) or 0)
    assert cut.budget.floor(engine_check.BLOCK_SIZE) == 7
    assert [policy.name for policy, _ in engine_check._variants(load_policy("full-kv"))] == [
        "full-kv"
    ]


MISUSE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hybrd", "-t", SMALL, "--gates", "G", "--against", "full-kv"), "did you mean 'hybrid'?"),
    (("hybrid", "-t", SMALL, "--gates", "nix.toml"), "no gates file 'nix.toml'"),
    (
        ("hybrid", "-t", SMALL, "--gates", "G"),
        "gate 'tokens_per_s >= 0.9x' is a factor of a baseline: name it by --ag",
    ),
    (("hybrid", "-t", SMALL, "--gates", "G", "--against", "full-k"), "did you mean 'full-kv'?"),
    (
        ("hybrid", "-t", SMALL, "-t", SMALL, "--gates", "G", "--against", "full-kv"),
        "a trace is named twice",
    ),
    (
        ("hybrid", "-t", "nix.csv", "--gates", "G", "--against", "full-kv"),
        "no trace file 'nix.csv'",
    ),
    (
        ("hybrid", "-t", SMALL, "--gates", "G", "--against", "full-kv", "--gpu", "h20"),
        "did you mean 'h200'?",
    ),
    (
        ("hybrid", "-t", SMALL, "--gates", "G", "--against", "full-kv", "--kv-blocks", "5"),
        "not fit in a pool of 5",
    ),
    (
        ("hybrid", "-t", SMALL, "--gates", "G", "--against", "full-kv", "--out", "nix/x.json"),
        "there is no folder nix",
    ),
    (
        ("hybrid", "-t", SMALL, "--gates", "G", "--against", "full-kv", "--who", " "),
        "--who needs a name",
    ),
    (("hybrid", "--gates", "G"), "Missing option '--trace'"),
)


@pytest.mark.parametrize(
    ("arguments", "words"), MISUSE, ids=[" ".join(words) for words, _ in MISUSE]
)
def test_misuse(gates: str, arguments: tuple[str, ...], words: str) -> None:
    result = zlab("validate", *(gates if word == "G" else word for word in arguments))
    assert result.exit_code == 2
    assert words in errors(result)
    assert result.stdout == ""


def test_a_bad_gate_is_named_by_file_and_line(tmp_path: Path) -> None:
    gates = written(tmp_path, EASY + 'p99_tfft = "<= 2 s"\n')
    result = zlab("validate", "hybrid", "-t", SMALL, "--gates", gates)
    assert result.exit_code == 2
    assert f"{gates}:6: unknown metric 'p99_tfft'; did you mean 'p99_ttft'?" in result.stderr
    needs = zlab(
        "validate", "hybrid", "-t", SMALL, "--gates", written(tmp_path, 'engine = "== ok"\n')
    )
    assert needs.exit_code == 2
    assert "gate 'engine == ok' needs --engine" in needs.stderr


def test_a_file_has_no_seeds(tmp_path: Path, gates: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.000000,10,5\n")
    fixed = (
        "validate",
        "hybrid",
        "-t",
        str(trace),
        "--against",
        "full-kv",
        "--gates",
        gates,
        *POOL,
    )
    result = zlab(*fixed, "--seeds", "2")
    assert result.exit_code == 2
    assert "--seeds 2 needs a made-up workload" in errors(result)
    mixed = json.loads(zlab(*fixed, "-t", SMALL, "--seeds", "2", "--json").stdout)
    assert [case["seed"] for case in mixed["cases"]] == [None, 0, 1]


def evaluation(folder: Path, solved: float, **changes: Any) -> str:
    """Results of `zlab evaluate` on a model of qwen3-8b's shape, with one compared policy."""

    def column(policy: str, share: float, compared: Any) -> dict[str, Any]:
        return {
            "name": policy,
            "policy": policy,
            "temperature": 0.0,
            "problems": 480,
            "pass_at_1": share,
            "pass_at_1_interval": [share - 0.01, share + 0.01],
            "of_baseline": compared,
        }

    compared = {
        "baseline": "full-kv",
        "ratio": solved / 0.9,
        "ratio_interval": [solved / 0.9 - 0.02, solved / 0.9 + 0.02],
        "length_ratio": 1.1,
    }
    shape = {"num_layers": 36, "num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    document = {
        "format": "zlab-evaluation/1",
        "made_at": "2026-12-01T00:00:00Z",
        "model": "Qwen3-8B",
        "model_shape": {**shape, "vocab_size": 151_936},
        "data": [{"name": "chain", "problems": 480}],
        "columns": [
            column("full-kv", 0.9, None),
            column("hybrid:tokens=1024", solved, compared),
        ],
        **changes,
    }
    path = folder / "results.json"
    path.write_text(json.dumps(document), "utf-8")
    return str(path)


def test_answers_are_part_of_the_evidence_and_asked_for(gates: str, tmp_path: Path) -> None:
    policy = "hybrid:budget.tokens=1024"
    given = ("-t", SMALL, *POOL, "--gates", gates, "--against", "full-kv", "--no-break-even")
    command = ("validate", policy, *given)
    registry = ("--registry", str(tmp_path / "registry.db"))
    silent = zlab(*command, *registry)
    assert silent.exit_code == 0, silent.stderr
    assert "nothing shows that answers stay right" in errors(silent)
    promote = ("promote", "hybrid:budget.tokens=1024", *registry)
    assert "does not show that answers stay right" in errors(zlab(*promote))
    poor = zlab(*command, "--quality", evaluation(tmp_path, 0.88))
    assert poor.exit_code == 1
    assert "did not pass: pass_at_1 >= 0.98x" in errors(poor)
    out = tmp_path / "evidence.json"
    good = zlab(*command, *registry, "--out", str(out), "--quality", evaluation(tmp_path, 0.89))
    assert good.exit_code == 0, good.stderr
    shown = " ".join(good.stdout.split())
    assert "answers: pass@1 89.0%, 0.989x [0.969, 1.009] of full-kv (480 problems" in shown
    evidence = read_evidence(out)
    assert evidence.quality is not None
    assert evidence.quality["ratio_interval"] == pytest.approx([0.969, 1.009], abs=0.001)
    assert evidence.cases[0].measured["pass_at_1"] == 0.89
    assert zlab(*promote).exit_code == 0
    assert "0.989x" in " ".join(zlab("history", *registry).stdout.split())


def test_a_reason_not_to_ask_for_answers_is_kept_and_shown(tmp_path: Path) -> None:
    lines = f'{EASY}{EXTENT}[quality]\nrequired = false\nreason = "a toy"\n'
    registry = ("--registry", str(tmp_path / "registry.db"))
    policy = "hybrid:budget.tokens=1024"
    command = ("validate", policy, "-t", SMALL, *POOL, "--against", "full-kv", "--no-break-even")
    done = zlab(*command, "--gates", written(tmp_path, lines), *registry)
    assert done.exit_code == 0, done.stderr
    assert "answers: not required: a toy" in done.stdout
    assert "warning" not in done.stderr
    assert zlab("promote", policy, *registry).exit_code == 0
    standings = json.loads(zlab("history", *registry, "--json").stdout)["standings"]
    assert standings[0]["quality"] == {"required": False, "reason": "a toy"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "x"}, "is no result of `zlab evaluate` (zlab-evaluation/1)"),
        ({"model_shape": None}, "was made on a server"),
        ({"model_shape": {"num_layers": 3}}, "was made with Qwen3-8B ({'num_layers': 3})"),
        ({"columns": []}, "hybrid:budget.tokens=1024 was not evaluated"),
    ],
)
def test_an_evaluation_of_something_else_is_refused(
    gates: str, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    command = ("validate", "hybrid:budget.tokens=1024", "-t", SMALL, *POOL, "--gates", gates)
    path = evaluation(tmp_path, 0.9, **changes)
    result = zlab(*command, "--against", "full-kv", "--quality", path)
    assert result.exit_code == 2
    assert words in errors(result)
