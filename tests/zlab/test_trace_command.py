"""`zlab trace` as its users meet it: what it prints, writes, refuses, and with which exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.traces.cases import AZURE, BENCH, BURSTGPT_1, MOONCAKE, write_rows, write_text
from zlab.cli.console import Bar
from zlab.cli.main import app
from zlab.cli.workloads import WorkloadSource
from zlab.traces.formats import read_trace
from zlab.traces.synthetic import Gamma, OnOff, Poisson, Together, arrivals_from, fixed, reasoning
from zlab.traces.workload import TraceError
from zlab.traces.workload_stats import prefix_reuse


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})


def as_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_made_up_workloads_stand_wherever_a_trace_does(tmp_path: Path) -> None:
    spec = "synth:amc23?num_problems=2&samples=3&seed=4"
    assert as_json("info", spec)["statistics"]["num_requests"] == 6
    for command in (
        ("cut", spec, tmp_path / "a.jsonl", "--first", 5),
        ("scale", spec, tmp_path / "b.jsonl", "--output", 2),
    ):
        assert run(*command).exit_code == 0
    assert list(read_trace(tmp_path / "a.jsonl")) == list(WorkloadSource(spec).read())[:5]
    joined = tmp_path / "c.jsonl"
    assert run("join", spec, tmp_path / "a.jsonl", "--out", joined, "--overlay").exit_code == 0
    assert len(read_trace(joined)) == 11


def test_info_as_json_and_as_table(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.jsonl", MOONCAKE)
    found = as_json("info", path, "--lru", 1, "--lru", 9)
    assert set(found) == {"meta", "statistics", "prefix_reuse", "lru_hit_shares", "workload_sha256"}
    assert found["statistics"]["num_requests"] == 3
    assert (
        found["prefix_reuse"]["num_reused_blocks"],
        found["prefix_reuse"]["num_wholly_cached"],
    ) == (2, 1)
    assert found["lru_hit_shares"] == {"1": 1 / 6, "9": 2 / 6}
    assert found["workload_sha256"] == read_trace(path).sha256
    shown = run("info", path)
    assert "3 read, 3 kept" in shown.stdout
    assert "2 of 6 blocks" in shown.stdout
    assert "1.500 s" in shown.stdout


def test_info_of_tokens_and_of_unknown_sharing(tmp_path: Path) -> None:
    bench = write_rows(tmp_path / "w.jsonl", BENCH)
    assert as_json("info", bench)["prefix_reuse"] is None
    assert "give --block-size" in run("info", bench).stdout
    assert as_json("info", bench, "--block-size", 1)["prefix_reuse"]["num_reused_blocks"] == 5
    azure = write_text(tmp_path / "a.csv", AZURE)
    assert "unknown (no block ids, no tokens)" in run("info", azure).stdout
    refused = run("info", azure, "--lru", 5)
    assert refused.exit_code == 2
    assert "--lru needs --block-size" in refused.stderr


def test_check_reports_and_exits_1(tmp_path: Path) -> None:
    good = run("check", write_text(tmp_path / "b.csv", BURSTGPT_1))
    assert good.exit_code == 0
    assert "0 bad rows; 3 read, 2 kept, 1 dropped: failed request" in good.stdout
    bad = write_text(
        tmp_path / "a.csv", AZURE + "\r\n2024-02-29 00:00:01,0,1\r\n2024-02-29 00:00:01,1,12.0"
    )
    shown = run("check", bad)
    assert shown.exit_code == 1
    assert "GeneratedTokens is '12.0', must be a whole number" in shown.stdout
    limited = run("check", bad, "--limit", 1)
    assert "and 1 more" in limited.stdout
    report = run("check", bad, "--json")
    assert report.exit_code == 1
    assert [row["line"] for row in json.loads(report.stdout)["bad_lines"]] == [4, 5]
    hopeless = run("check", write_text(tmp_path / "c.csv", "a,b\n1,2\n"))
    assert hopeless.exit_code == 1
    assert "has no header line of a known format" in hopeless.stderr
    assert run("check", bad, "--format", "azur").exit_code == 2
    assert run("check", tmp_path / "none.csv").exit_code == 2


def test_a_job_told_of_in_shares_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zlab.cli.console.SHOW_AFTER_S", 0.0)
    with Bar("reading t.csv") as bar:
        bar.share(0.25)
    with Bar("quiet", silent=True) as bar:
        bar.share(0.5)
    assert capsys.readouterr().err.startswith(
        "reading t.csv: 25 of 100 % after 0 s, about 0 s left\n"
    )


def test_check_strict_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.jsonl", MOONCAKE[::-1])
    relaxed = run("check", path)
    assert relaxed.exit_code == 0
    assert "note: sorted by arrival" in relaxed.stdout
    assert run("check", path, "--strict-order").exit_code == 1


def test_convert_there_and_back(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "m.jsonl", MOONCAKE)
    packed, back = tmp_path / "n.jsonl.gz", tmp_path / "back.jsonl"
    assert run("convert", source, packed).exit_code == 0
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    assert (tmp_path / "n.meta.json").is_file()
    assert run("convert", packed, back, "--to", "mooncake").exit_code == 0
    assert [json.loads(line) for line in back.read_text(encoding="utf-8").splitlines()] == MOONCAKE


def test_convert_refuses_bad_rows_unless_told(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "m.jsonl", [*MOONCAKE, {**MOONCAKE[2], "input_length": 0}])
    target = tmp_path / "n.jsonl"
    refused = run("convert", source, target)
    assert refused.exit_code == 1
    assert f"error: {source}:4: input_length is 0, must be at least 1" in refused.stderr
    assert refused.stdout == ""
    assert not target.exists()
    assert run("convert", source, target, "--skip-bad").exit_code == 0
    assert read_trace(target).meta.dropped == {"input_length is below 1": 1}


def test_synth_writes_what_python_makes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert run("synth", "reasoning", "--shape", "aime24", "--seed", 3, "--out", path).exit_code == 0
    assert read_trace(path).sha256 == reasoning("aime24", 3).sha256
    assert run("synth", "fixed", "--requests", 50, "--out", path).exit_code == 0
    assert read_trace(path).sha256 == fixed(50).sha256
    assert run("synth", "reasoning", "--problems", 2, "--samples", 3, "--out", path).exit_code == 0
    assert len(read_trace(path)) == 6


@pytest.mark.parametrize("kind", ["chat", "shared-prefix", "bursty"])
def test_synth_kinds_depend_on_seed_and_options(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{i}.jsonl" for i in range(4)]
    for path, options in zip(
        files, [[], [], ["--seed", "1"], ["--arrivals", "gamma:9:2"]], strict=True
    ):
        assert run("synth", kind, "--requests", 40, "--out", path, *options).exit_code == 0
    contents = [path.read_bytes() for path in files]
    assert contents[0] == contents[1]
    assert len(set(contents)) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["synth", "chta", "--out", "x"], "chat"),
        (["synth", "chat", "--out", "x", "--requets", "3"], "--requests"),
        (["synth", "chat", "--out", "x", "--arrivals", "poison:1"], "did you mean 'poisson'?"),
        (["synth", "reasoning", "--out", "x", "--shape", "amc24"], "did you mean 'amc23'?"),
        (["synth", "fixed", "--out", "x", "--rate", "-1"], "rate_per_s is -1.0"),
        (["synth", "chat"], "--out"),
        (["inof"], "info"),
    ],
)
def test_misuse_names_the_nearest_choice(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_arrival_specifications() -> None:
    assert arrivals_from("together") == Together()
    assert arrivals_from("poisson:2") == Poisson(2.0)
    assert arrivals_from("gamma:2:0.5") == Gamma(2.0, 0.5)
    assert arrivals_from("onoff:9:1:2:3") == OnOff(9.0, 1.0, 2.0, 3.0)
    for spec, said in [
        ("gamma:2", "gamma takes rate_per_s, cv"),
        ("together:1", "takes no number"),
        ("poisson:x", "could not convert"),
        ("poisson:0", "rate_per_s is 0.0"),
    ]:
        with pytest.raises(TraceError, match=said):
            arrivals_from(spec)


def test_cut_scale_and_join(tmp_path: Path) -> None:
    source, part, scaled, joined = (tmp_path / f"{name}.jsonl" for name in ("s", "p", "c", "j"))
    assert run("synth", "shared-prefix", "--requests", 300, "--out", source).exit_code == 0
    assert (
        run("cut", source, part, "--end", 100, "--class", "group-0", "--first", 20).exit_code == 0
    )
    assert {request.cls for request in read_trace(part)} == {"group-0"}
    assert len(read_trace(part)) == 20
    assert (
        run(
            "scale", source, scaled, "--faster", 2, "--thin", 0.5, "--seed", 4, "--token-ids"
        ).exit_code
        == 0
    )
    changed = read_trace(scaled)
    assert changed.meta.modifications == (
        "thinned to 0.5, seed 4",
        "arrivals x 2",
        "token ids made from block ids, seed 4",
    )
    assert all(request.prompt_ids is not None for request in changed)
    assert run("join", part, source, "--out", joined, "--same-blocks").exit_code == 0
    assert len(read_trace(joined)) == 320
    assert prefix_reuse(read_trace(joined)).num_wholly_cached >= 20
    assert run("join", part, source, "--out", joined, "--overlay").exit_code == 0
    assert "merged" in read_trace(joined).meta.modifications[-1]


def test_spread_and_stretch(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "m.jsonl", MOONCAKE), tmp_path / "t.jsonl"
    assert (
        run(
            "scale", source, target, "--spread", "even", "--spread-over", 1, "--output", 2
        ).exit_code
        == 0
    )
    found = read_trace(target)
    assert [request.arrival_s for request in found] == [0.0, 1.5, 2.0]
    assert [request.output_tokens for request in found] == [10, 12, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to do"),
        (["--faster", "2", "--seed", "1"], "--seed needs"),
        (["--faster", "2", "--spread-over", "1"], "--spread-over needs --spread"),
        (["--prompt", "2"], "prompt lengths cannot be multiplied"),
        (["--spread", "odd"], "even"),
        (["--thin", "2"], "keep is 2.0"),
    ],
)
def test_scale_misuse(tmp_path: Path, options: list[str], said: str) -> None:
    result = run(
        "scale", write_rows(tmp_path / "m.jsonl", MOONCAKE), tmp_path / "t.jsonl", *options
    )
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "t.jsonl").exists()


def test_join_misuse(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "m.jsonl", MOONCAKE)
    result = run("join", source, source, "--out", tmp_path / "x.jsonl", "--overlay", "--gap", 2)
    assert (result.exit_code, "--gap has no meaning" in result.stderr) == (2, True)
    assert run("join", source, "--out", tmp_path / "x.jsonl").exit_code == 2
