"""Every misuse of the command line: exit code, message on stderr with the value and the choices, nothing on stdout."""

import json
from pathlib import Path

import pytest

from sim.cost import COEFFICIENT_UNITS
from sim.hardware import find_model
from sim.profile import SHAPE
from tests.house_source import ROOT
from tests.zlab.command_line import SMALL, errors, zlab

OWN = str(ROOT / "docs" / "examples" / "fewest_left.py")
JUDGED = ("validate", "hybrid", "--trace", SMALL, "--gates", "nix.toml")
MISUSE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("replay", SMALL, "--policy", "hybrd"), "unknown policy 'hybrd'; did you mean 'hybrid'? (choices: constrained,"),
    (("replay", SMALL, "--policy", "hybrid:prefx=none"), "unknown policy setting 'prefx'; did you mean 'prefix'?"),
    (("replay", SMALL, "--policy", "hybrid:slots=hybird"), "unknown slots 'hybird'; did you mean 'hybrid'?"),
    (("replay", SMALL, "--policy", "hybrid:budget.tokns=9"), "'tokns'; did you mean 'tokens'?"),
    (("replay", SMALL, "--policy", "hybrid:budget.tokens=x"), "budget.tokens must be a int, not 'x'"),
    (("replay", SMALL, "--policy", "hybrid:join"), "'join' is not of the form key=value"),
    (("replay", SMALL, "--policy", "nix.toml"), "no policy file 'nix.toml'"),
    (("replay", SMALL, "--policy", "nix.py:Mine"), "no such file: nix.py"),
    (("replay", SMALL, "--gpu", "h20"), "unknown GPU 'h20': did you mean 'h200'?"),
    (("replay", SMALL, "--model", "qwen3-8"), "unknown model 'qwen3-8': did you mean 'qwen3-8b'?"),
    (("replay", SMALL, "--gpu", "rtx4090", "--model", "qwen3-32b"), "model qwen3-32b does not fit on rtx4090"),
    (("replay", SMALL, "--kv-block", "3"), "No such option: --kv-block"),
    (("replay", SMALL, "--kv-blocks", "0"), "Invalid value for '--kv-blocks'"),
    (("replay", SMALL, "--kv-blocks", "many"), "Invalid value for '--kv-blocks'"),
    (("replay", SMALL, "--kv-blocks", "5"), "a budget of 9 blocks does not fit in a pool of 5"),
    (("replay", SMALL, "--kv-blocks", "5", "--memory-utilisation", "0.5"), "cannot be given together with kv-blocks"),
    (("replay", SMALL, "--policy", OWN), f"{OWN}: which class of the file? Write {OWN}:CLASS (it has: FewestLeft)"),
    (("replay", SMALL, "--memory-utilisation", "2"), "memory utilisation must be above 0 and at most 1, got 2.0"),
    (("replay", SMALL, "--length-multiplier", "0"), "length-multiplier must be a finite number above 0, got 0.0"),
    (("replay", SMALL, "--max-model-len", "50000"), "50000 is beyond the 40960 positions of model qwen3-8b"),
    (("replay", SMALL, "--cost", "nix.json"), "cannot read profile nix.json"),
    (("replay", SMALL, "--format", "azure"), "is no file: --format and --skip-bad-rows do not apply"),
    (("replay", SMALL, "--perfetto", "x.txt"), "must end in .json"),
    (("replay", SMALL, "--perfetto", "nix/x.json"), "there is no folder nix"),
    (("replay", "nix.csv"), "no trace file 'nix.csv'"),
    (("replay", "synth:amc"), "unknown kind of made-up workload 'amc'; did you mean 'amc23'?"),
    (("replay", "synth:amc23?sample=3"), "unknown setting of synth:amc23 'sample'; did you mean 'samples'?"),
    (("replay", "synth:amc23?samples=x"), "samples must be a whole number, not 'x'"),
    (("replay", "synth:amc23?samples=0"), "samples is 0, must be a whole number >= 1"),
    (("replay", "synth:amc23?samples"), "'samples' is not of the form key=value"),
    (("replay", "synth:amc23?seed=1&seed=2"), "seed stands twice"),
    (("replay", "synth:amc23?arrivals=poison:3"), "unknown arrivals 'poison' (did you mean poisson?)"),
    (("replay", "synth:fixed?arrivals=poisson:3"), "write rate_per_s=... instead of arrivals"),
    (("replay", "synth:chat?num_requests=5", "--block-size", "24"), "do not divide one another (choices: 16, 8"),
    (("compare", SMALL), "Missing option '--policy'"),
    (("compare", SMALL, "-p", "hybrid", "-p", "hybrid"), "a policy is named twice"),
    (("compare", SMALL, "-p", "hybrid", "-p", "hybrd"), "did you mean 'hybrid'?"),
    (("sweep", SMALL), "Missing option '--grid'"),
    (("sweep", SMALL, "--grid", "kv-blocks"), "is not of the form KEY=A,B,..."),
    (("sweep", SMALL, "--grid", "kv-blocks="), "is not of the form KEY=A,B,..."),
    (("sweep", SMALL, "--grid", "kv-block=1"), "unknown grid key 'kv-block'; did you mean 'kv-blocks'?"),
    (("sweep", SMALL, "--grid", "budget.tokns=1"), "did you mean 'budget.tokens'?"),
    (("sweep", SMALL, "--grid", "kv-blocks=a"), "kv-blocks must be a whole number, not 'a'"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--grid", "kv-blocks=2"), "--grid kv-blocks stands twice"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--out", "x.txt"), "must end in .csv, .json, .parquet"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--out", "nix/x.csv"), "there is no folder nix"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--backend", "dask"), "--backend dask needs --cluster ADDRESS"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--cluster", "tcp://x:1"), "needs --backend dask or ray"),
    (("sweep", SMALL, "--grid", "kv-blocks=1", "--backend", "dusk"), "'dusk' is not one of 'loky', 'dask', 'ray'"),
    ((*JUDGED, "--device", "cpu"), "--device cpu says where --engine runs, and that is not given"),
    ((*JUDGED, "--dtype", "float32"), "--dtype float32 says where --engine runs"),
    ((*JUDGED, "--engine-model", "smollm2"), "--engine-model smollm2 says where --engine runs"),
    ((*JUDGED, "--why", "a hunch"), "--why 'a hunch' goes into the history of a --registry, and there is none"),
    (("promote", "hybrid", "--admin-key-file", OWN), f"--admin-key-file {OWN} is for the server of --live"),
    (("rollback", "--admin-key-file", OWN), f"--admin-key-file {OWN} is for the server of --live"),
    (("policy", "show", "hybrd"), "did you mean 'hybrid'?"),
    (("memry",), "No such command 'memry'"),
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), MISUSE, ids=[" ".join(arguments) for arguments, _ in MISUSE])
def test_misuse(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZLAB_REGISTRY", raising=False)
    result = zlab(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in errors(result)


def test_a_file_has_no_seeds_and_formats_are_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.000000,10,5\n")
    for arguments, words in (
        (("compare", str(path), "-p", "hybrid", "--seeds", "2"), "is one fixed workload: --seeds 2 needs a made-up"),
        (("sweep", str(path), "--grid", "seed=1,2"), "is one fixed workload: only a synth:... spec has seeds"),
        (("replay", str(path), "--format", "azur"), "unknown trace format 'azur' (did you mean azure?)"),
    ):
        result = zlab(*arguments)
        assert result.exit_code == 2
        assert words in errors(result)


def test_a_recording_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    for command in (("replay", SMALL), ("compare", SMALL, "-p", "hybrid")):
        result = zlab(*command, "--out", str(tmp_path))
        assert result.exit_code == 2
        assert result.stderr == f"error: --out {tmp_path}: is not empty; a recording needs a folder of its own\n"
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def profile(**changes: object) -> str:
    """A measured profile of qwen3-8b on h200 as a file's text."""
    values = dict.fromkeys(COEFFICIENT_UNITS, 1e-6) | {"compression_share": 0.5}
    model = find_model("qwen3-8b")
    coefficients = {name: {"value": values[name], "unit": unit} for name, unit in COEFFICIENT_UNITS.items()}
    document = {
        "format": "zlab-profile/3", "gpu": "h200", "model": "qwen3-8b", "dtype": "bfloat16", "card": "NVIDIA H200",
        "date": "2026-11-29", "versions": {"torch": "2"}, "block_size": 256, "window": 16, "coefficients": coefficients,
        "fit_error": {"decode": {"mean_relative": 0.01, "max_relative": 0.02, "num_points": 9}},
        "held_out_error": {"decode": {"mean_relative": 0.01, "max_relative": 0.02, "num_points": 9}},
        "shape": {name: getattr(model, name) for name in SHAPE}, "also": {},
    }  # fmt: skip
    return json.dumps(document | changes)


def test_measured_costs_are_used_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "h200-qwen3-8b-bfloat16.json"
    path.write_text(profile())
    fine = zlab("replay", SMALL, "--cost", str(path))
    assert fine.exit_code == 0
    assert "costs: h200-qwen3-8b-bfloat16 2026-11-29" in " ".join(fine.stdout.split())
    unknown = zlab("replay", SMALL, "--profile", "h200-qwen3-9b-bfloat16")
    assert unknown.exit_code == 2
    assert "no measured profile 'h200-qwen3-9b-bfloat16'; " in errors(unknown)
    for options, words in (
        (("--gpu", "h100"), "was measured on h200 with qwen3-8b, not on h100 with qwen3-8b"),
        (("--policy", "hybrid:window=8"), "a window of 16, not for blocks of 256 and a window of 8"),
    ):
        result = zlab("replay", SMALL, "--cost", str(path), *options)
        assert result.exit_code == 2
        assert words in errors(result)
    assert zlab("replay", SMALL, "--cost", str(path), "--policy", "full-kv:window=8").exit_code == 0
