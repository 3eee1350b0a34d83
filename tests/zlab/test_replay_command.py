"""`zlab replay`: what it prints, what it writes, how it ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import SHARED, needs_shared
from tests.zlab.command_line import (
    LONG,
    PATIENCE_S,
    SMALL,
    SMALL_POOL,
    errors,
    start,
    wait_for_words,
    zlab,
)
from zlab.policies.spec import load_policy
from zlab.sim.replay import default_limits, replay
from zlab.sim.specs import GPUS, MODELS
from zlab.traces.recording import Recording, load_run
from zlab.traces.synthetic import REASONING_SHAPES, ReasoningShape, reasoning

CONTRACT = (
    "requests_finished requests_refused output_tokens makespan_s tokens_per_s seconds_to_90pct "
    "prefill_steps "
    "decode_steps steps_to_90pct prefill_tokens recomputed_tokens prefix_hit_tokens preemptions "
    "swaps compressions "
    "running_mean running_max occupancy_mean occupancy_max ttft_s tpot_s e2e_s digest wall_s "
    "policy workload_sha256"
)


def test_json_is_one_object_with_the_keys_of_the_contract() -> None:
    result = zlab("replay", SMALL, *SMALL_POOL, "--policy", "full-kv", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    summary = json.loads(result.stdout)
    assert set(summary) >= set(CONTRACT.split(" "))
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(summary[name]) == {"mean", "p50", "p90", "p99"}
    assert summary["requests_finished"] == 16
    assert summary["preemptions"] > 0


def test_a_command_and_a_call_from_python_decide_the_same() -> None:
    shown = json.loads(zlab("replay", SMALL, "--policy", "hybrid", "--json").stdout)
    shape = ReasoningShape(8, mu=7.2, sigma=REASONING_SHAPES["amc23"].sigma, samples=2, cap=4096)
    run = replay(reasoning(shape), "hybrid", gpu="h200", model="qwen3-8b")
    assert shown["digest"] == run.summary["digest"]
    assert shown["workload_sha256"] == run.summary["workload_sha256"]
    assert shown["tokens_per_s"] == run.summary["tokens_per_s"]


def test_the_table_shows_every_figure_the_issue_lists() -> None:
    result = zlab("replay", SMALL, *SMALL_POOL, "--policy", "hybrid")
    assert result.exit_code == 0
    for words in (
        "hybrid on h200 with qwen3-8b",
        "pool of 40 blocks of 256 tokens",
        "costs: roofline",
        "output tokens/s",
        "requests/s",
        "time to first token, s",
        "time per output token, ms",
        "end to end, s",
        "running requests",
        "blocks in use",
        "wasted slots in blocks",
        "preemptions",
        "recomputed tokens",
        "swapped tokens",
        "prefix hit tokens",
        "compressions' share of time",
        "waited for a slot",
        "refused",
    ):
        assert words in result.stdout


def test_the_table_fits_a_narrow_terminal() -> None:
    result = zlab("replay", SMALL, *SMALL_POOL)
    rows = [
        line
        for line in result.stdout.splitlines()
        if line.startswith((" output", " time", " end to end"))
    ]
    assert len(rows) == 5
    assert max(len(row.rstrip()) for row in rows) <= 80


def test_blocks_come_from_the_cards_memory_unless_given() -> None:
    policy = load_policy("full-kv")
    for options, expected in (
        ((), default_limits(GPUS["l40s"], MODELS["qwen3-8b"], policy)),
        (
            ("--memory-utilisation", "0.6"),
            default_limits(GPUS["l40s"], MODELS["qwen3-8b"], policy, utilisation=0.6),
        ),
    ):
        shown = zlab("replay", SMALL, "--policy", "full-kv", "--gpu", "l40s", *options).stdout
        assert f"pool of {expected.num_blocks:,} blocks" in shown


def test_every_size_reaches_the_run(tmp_path: Path) -> None:
    options = {
        "kv-blocks": 600,
        "block-size": 16,
        "max-batched-tokens": 512,
        "max-running": 7,
        "max-model-len": 3000,
        "host-blocks": 11,
    }
    flat = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "run"
    assert zlab("replay", SMALL, "--policy", "full-kv", *flat, "--out", str(out)).exit_code == 0
    limits = Recording(out).manifest["limits"]
    names = {"num_blocks": "kv-blocks"}
    assert limits == {key: options[names.get(key, key.replace("_", "-"))] for key in limits}
    assert load_run(out).summary["running_max"] == 7


def test_plain_steps_give_the_same_decisions_and_times() -> None:
    fast, plain = (
        json.loads(zlab("replay", SMALL, *SMALL_POOL, "--json", *option).stdout)
        for option in ((), ("--plain-steps",))
    )
    assert fast["digest"] == plain["digest"]
    assert fast["e2e_s"] == plain["e2e_s"]


def test_longer_outputs_where_requests_are_compressed() -> None:
    plain, longer = (
        json.loads(
            zlab(
                "replay", SMALL, *SMALL_POOL, "-p", "hybrid:budget.tokens=512", "--json", *option
            ).stdout
        )
        for option in ((), ("--length-multiplier", "1.5"))
    )
    assert plain["output_tokens"] < longer["output_tokens"] <= 1.5 * plain["output_tokens"] + 16


def test_a_recording_and_a_chrome_trace_are_written(tmp_path: Path) -> None:
    out, trace = tmp_path / "run", tmp_path / "trace.json"
    result = zlab("replay", SMALL, *SMALL_POOL, "--out", str(out), "--perfetto", str(trace))
    assert f"recording in {out}\n" in result.stdout
    assert Recording(out).complete
    assert load_run(out).summary["requests_finished"] == 16
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C"}
    alone = tmp_path / "alone.json"
    assert zlab("replay", SMALL, *SMALL_POOL, "--perfetto", str(alone)).exit_code == 0
    assert alone.read_text() == trace.read_text()


def test_refused_requests_are_counted_with_the_reason() -> None:
    result = zlab("replay", SMALL, "--policy", "full-kv", "--kv-blocks", "8")
    assert result.exit_code == 0
    assert "(never_fits), the first p" in result.stdout
    assert "the pool has 8" in result.stdout


def test_a_run_that_serves_nobody_ends_with_1() -> None:
    result = zlab("replay", SMALL, "--max-model-len", "64", "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["requests_refused"] == 16
    assert sum(one["requests"] for one in shown["refusals"]) == 16
    assert all(one["first"]["message"] for one in shown["refusals"])
    assert shown["limits"]["num_blocks"] > 0
    assert (shown["gpu"], shown["model"]) == ("h200", "qwen3-8b")
    assert result.stderr == "error: no request could be served\n"


def test_bad_rows_end_with_1_or_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ("2024-05-10 00:00:00.000000,10,5", "2024-05-10 00:00:01.000000,-1,5")
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    result = zlab("replay", str(path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {path}:3: ")
    skipped = zlab("replay", str(path), "--skip-bad-rows", "--json")
    assert skipped.exit_code == 0
    assert json.loads(skipped.stdout)["requests_finished"] == 1


@needs_shared
def test_prefix_hits_are_set_beside_what_the_trace_repeats(tmp_path: Path) -> None:
    head = (
        (SHARED / "traces/mooncake_synthetic_trace.jsonl")
        .read_text()
        .splitlines(keepends=True)[:100]
    )
    path = tmp_path / "head.jsonl"
    path.write_text("".join(head))
    shown = " ".join(zlab("replay", str(path)).stdout.split())
    assert "prefix hits are " in shown
    assert "repeat an earlier one's" in shown


def test_ctrl_c_leaves_a_readable_recording_marked_incomplete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = LONG.replace("samples=32", "samples=128")  # a minute's work and more
    options = ("--kv-blocks", "512", "--policy", "full-kv", "--plain-steps", "--out", str(out))
    process = start(["replay", endless, *options])
    wait_for_words(process, " of 5,120 requests after ")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert stdout == ""
    assert "interrupted at " in stderr
    assert "marked incomplete" in stderr
    recording = Recording(out)
    assert not recording.complete
    assert recording.manifest["stopped_by"] == "KeyboardInterrupt"
    run = load_run(out)
    numbers = run.requests["number"].to_pylist()
    assert len(numbers) == len(set(numbers)) == 5120
    assert "unfinished" in run.requests["status"].to_pylist()
    assert run.summary["output_tokens"] == sum(run.steps["output_tokens"].to_pylist())


def test_progress_goes_to_stderr_and_not_beside_json() -> None:
    arguments = [
        sys.executable,
        "-m",
        "zlab",
        "replay",
        LONG,
        "--kv-blocks",
        "512",
        "--plain-steps",
    ]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert " of 1,280 requests after " in shown.stderr
    assert "s left" in shown.stderr
    assert "requests after" not in shown.stdout


@pytest.mark.parametrize(
    "arguments", [("--version",), ("-h",), ("replay", "--help"), ("policy", "-h")]
)
def test_help_and_version(arguments: tuple[str, ...]) -> None:
    result = zlab(*arguments)
    assert result.exit_code == 0
    assert "zlab" in result.stdout


def test_another_policy_takes_over_at_a_step() -> None:
    words = (
        "--policy",
        "full-kv",
        "--change",
        "300:hybrid:budget.tokens=512",
        "--change",
        "900:full-kv",
    )
    shown = zlab("replay", SMALL, *SMALL_POOL, *words)
    assert shown.exit_code == 0
    assert "from step 300 on: hybrid:budget.tokens=512" in shown.stdout
    assert shown.stdout.index("from step 300 on") < shown.stdout.index("from step 900 on: full-kv")
    changed, plain = (
        json.loads(zlab("replay", SMALL, *SMALL_POOL, *some, "--json").stdout)
        for some in (words, words[:2])
    )
    assert changed["compressions"] > 0 == plain["compressions"]
    assert changed["requests_finished"] == plain["requests_finished"] == 16
    assert changed["digest"] != plain["digest"]


def test_changes_that_never_come_and_ones_that_make_no_sense() -> None:
    late = zlab("replay", SMALL, *SMALL_POOL, "--change", "99999999:full-kv")
    assert late.exit_code == 0
    assert "--change 99999999:full-kv: the run was over after" in late.stderr
    for words, said in (
        ("hybrid", "must be STEP:POLICY, as 4000:hybrid, not 'hybrid'"),
        ("5:hybird", "did you mean 'hybrid'"),
        ("5:hybrid:budget.tokens=99999999", "does not fit in a pool of 40"),
    ):
        bad = zlab("replay", SMALL, *SMALL_POOL, "--change", words)
        assert bad.exit_code == 2
        assert said in bad.stderr
    order = zlab("replay", SMALL, *SMALL_POOL, "--change", "5:hybrid", "--change", "4:full-kv")
    assert order.exit_code == 2
    assert "in order of their steps: 4 after 5" in order.stderr


@pytest.mark.parametrize(
    "unused",
    [
        ("-p", "full-kv", "--block-size", "4"),  # an observation window of 16 tokens
        ("-p", "nano-vllm", "--block-size", "8"),
        ("-p", "hybrid:slots=none,scorer=recent", "--block-size", "8"),
        ("-p", "hybrid:scorer=random", "--block-size", "8"),
        ("-p", "full-kv:prefix=none", "--block-size", "24"),  # prefix ids of 16 tokens
        ("-p", "hybrid-adaptive:budget.blocks=4,budget.tokens=9000"),  # more than most_tokens
    ],
)
def test_a_setting_is_checked_only_where_it_is_used(unused: tuple[str, ...]) -> None:
    result = zlab("replay", "synth:chat?num_requests=6", *unused, "--kv-blocks", "3000", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["requests_finished"] == 6


def test_a_change_to_a_policy_that_uses_a_setting_is_checked() -> None:
    pool = ("--block-size", "24", "--kv-blocks", "3000")
    change = ("-p", "full-kv:prefix=none", "--change", "5:full-kv")
    result = zlab("replay", "synth:chat?num_requests=6", *change, *pool)
    assert result.exit_code == 2
    assert "do not divide one another" in errors(result)


def test_a_replay_says_what_it_assumes_of_lengths_and_finds_the_break_even() -> None:
    policy = ("--policy", "hybrid:budget.tokens=512")
    command = ("replay", SMALL, *SMALL_POOL, *policy, "--break-even", "full-kv")
    shown = " ".join(zlab(*command).stdout.split())
    assert "not known: no length profile was given" in shown
    assert "finishes more requests a second than full-kv until outputs get" in shown
    found = json.loads(zlab(*command, "--json").stdout)
    assert found["lengths"]["known"] is False
    assert found["break_even"]["multiplier"] > 1
    assert found["solved_per_s"] is None
    whole = zlab("replay", SMALL, *SMALL_POOL, "--policy", "full-kv").stdout
    assert "length" not in whole
    refused = zlab(*command, "--change", "3:full-kv")
    assert refused.exit_code == 2
    assert "--break-even is about one policy" in refused.stderr


def test_a_pool_that_no_card_holds_is_refused_unless_pretended(tmp_path: Path) -> None:
    base = ["replay", "synth:fixed?num_requests=4&prompt=40&output=60", "--gpu", "rtx4090"]
    base += ["--model", "qwen3-32b", "--kv-blocks", "64"]
    refused = zlab(*base)
    assert refused.exit_code == 2
    assert "64 blocks of 256 tokens do not fit on one rtx4090 beside qwen3-32b" in refused.stderr
    assert "--pretend" in refused.stderr
    out = tmp_path / "run"
    told = zlab(*base, "--pretend", "--out", str(out))
    assert "pretended: 64 blocks of 256 tokens do not fit" in told.stdout
    assert "do not fit" in load_run(out).manifest["pretended"]
    assert "do not fit" in json.loads(zlab(*base, "--pretend", "--json").stdout)["pretended"]
    fits = [*base[:2], "--kv-blocks", "64", "--pretend", "--json"]
    real = zlab(*fits)
    assert "nothing is pretended" in real.stderr
    assert "pretended" not in json.loads(real.stdout)
