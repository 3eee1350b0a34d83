"""`zlab drift` as a user meets it: what it compares, what its exit code means, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.disguised import disguised
from tests.sim.test_drift import COST, POLICY, load, slower
from tests.zlab.command_line import errors, zlab
from zlab.traces.formats import write_native

ROOFLINE = ("--gpu", "h200", "--model", "qwen3-8b")
KEPT = Path(__file__).parents[1] / "data" / "engine-tiny"


@pytest.fixture(scope="module")
def as_predicted(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drift")
    write_native(replace(load(), meta=replace(load().meta, name="judged")), folder / "judged.jsonl")
    return str(disguised(folder / "run", load(), POLICY, COST))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        disguised(tmp_path_factory.mktemp("slow") / "run", load(gap_s=0.0), POLICY, slower(1.3))
    )


def test_a_run_as_predicted_is_within(as_predicted: str) -> None:
    judged = str(Path(as_predicted).parent / "judged.jsonl")
    done = zlab(
        "drift",
        as_predicted,
        *ROOFLINE,
        "--within",
        "0.1%",
        "--trace",
        judged,
        "--load-within",
        "0.05",
    )
    assert done.exit_code == 0, done.output
    assert "60 finished live and in the prediction as it was served" in " ".join(
        done.stdout.split()
    )
    assert "NO" not in done.stdout
    assert "prompt tokens: alike (distance 0.00)" in done.stdout


def test_a_slower_engine_is_told_with_its_figures(slow: str) -> None:
    assert zlab("drift", slow, *ROOFLINE, "--within", "40%").exit_code == 0
    done = zlab("drift", slow, *ROOFLINE, "--within", "0.1", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["within"] == 0.1
    assert {"tokens_per_s", "e2e_s p50"} <= set(found["beyond"])
    assert found["whole"]["figures"]["e2e_s p50"]["relative"] == pytest.approx(0.3, abs=0.02)
    assert len(found["windows"]) == 6


def test_windows_may_be_held_to_it_too(tmp_path: Path, as_predicted: str) -> None:
    assert zlab("drift", as_predicted, *ROOFLINE, "--each-window", "--windows", "3").exit_code == 0
    folder = str(disguised(tmp_path / "run", load(gap_s=0.2), POLICY, slower(1.3)))
    lenient = ("drift", folder, *ROOFLINE, "--within", "45%", "--windows", "40")
    assert zlab(*lenient).exit_code == 0
    assert zlab(*lenient, "--each-window").exit_code == 1


def test_gates_hold_live_against_the_prediction(tmp_path: Path, slow: str) -> None:
    gates = tmp_path / "gates.toml"
    gates.write_text('[gates]\ntokens_per_s = ">= 0.9x"\nfailed = "== 0"\nlaws = "== ok"\n')
    broken = zlab("drift", slow, *ROOFLINE, "--within", "50%", "--gates", str(gates))
    assert broken.exit_code == 1
    assert "FAILED" in broken.stdout
    assert "UNMEASURED" in broken.stdout
    gates.write_text('[gates]\ntokens_per_s = ">= 0.7x"\n')
    assert zlab("drift", slow, *ROOFLINE, "--within", "50%", "--gates", str(gates)).exit_code == 0


def test_a_profile_of_other_blocks_is_passed_over_unless_it_is_named(as_predicted: str) -> None:
    """The card and model of this run have been measured, but with blocks of 256: by default the
    roofline is taken.
    """
    done = zlab("drift", as_predicted, "--within", "0.1%")
    assert done.exit_code == 0, done.output
    words = " ".join((done.stdout + done.stderr).split())
    assert "block size 256, recorded with 16; costs are the roofline's" in words
    named = zlab("drift", as_predicted, "--profile", "h200-qwen3-8b-bfloat16")
    assert named.exit_code == 2
    assert "does not belong to" in errors(named)


def test_a_candidate_is_predicted_instead(as_predicted: str) -> None:
    done = zlab("drift", as_predicted, *ROOFLINE, "--policy", "full-kv", "--within", "1000%")
    assert "in the prediction under full-kv" in " ".join(done.stdout.split())
    found = json.loads(
        zlab("drift", as_predicted, *ROOFLINE, "--policy", "full-kv", "--json").stdout
    )
    assert found["policy"] == "full-kv"
    assert found["whole"]["figures"]["compressions_per_request"]["predicted"] == 0


def test_a_load_that_moved_is_named(tmp_path: Path, as_predicted: str) -> None:
    other = replace(
        load(), requests=[replace(row, prompt_tokens=row.prompt_tokens * 5) for row in load()]
    )
    write_native(replace(other, meta=replace(other.meta, name="other")), tmp_path / "other.jsonl")
    args = ("drift", as_predicted, *ROOFLINE, "--trace", str(tmp_path / "other.jsonl"))
    assert zlab(*args).exit_code == 0
    done = zlab(*args, "--load-within", "0.3")
    assert done.exit_code == 1
    assert "prompt tokens: another distribution, shorter, half above" in done.stdout


def test_the_engines_own_recording_is_compared() -> None:
    """Kept with the tests: made by `zlab bench` on a CPU, for which no row of cards has a
    roofline.
    """
    done = zlab("drift", str(KEPT), *ROOFLINE, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["num_compared"] > 0
    assert found["whole"]["figures"]["preemptions_per_request"]["live"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--within", "much"), "--within must be a share, as 10% or 0.1, not 'much'"),
        (("--within", "-5%"), "--within must be a share"),
        (("--load-within", "0.1"), "--load-within needs --trace"),
        (("--policy", "hybrit"), "did you mean"),
        (("--gates", "nowhere.toml"), "--gates nowhere.toml: cannot be read"),
        (("--profile", "nowhere", "--gpu", "h200"), "--gpu and --model name a roofline"),
        (("--gpu", "h300"), "h300"),
        (("--trace", "nowhere.jsonl"), "no trace file 'nowhere.jsonl'"),
    ],
)
def test_misuse_is_named(as_predicted: str, arguments: tuple[str, ...], words: str) -> None:
    done = zlab("drift", as_predicted, *arguments)
    assert done.exit_code == 2, done.output
    assert words in errors(done)


def test_what_is_no_recording_is_an_error(tmp_path: Path) -> None:
    done = zlab("drift", str(tmp_path))
    assert done.exit_code == 1
    assert "it has no manifest.json" in errors(done)
