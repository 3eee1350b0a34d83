"""`zlab calibrate`: measures, fits, writes a profile; refuses what makes no sense."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from tests.sim.cases import TRUTH, document
from tests.zlab.command_line import errors, zlab
from zlab.cli.calibrate import MeasuringOptions
from zlab.engine.calibration import QUICK, CalibrationSettings, Chunks
from zlab.sim.cost_model import CostModel
from zlab.sim.profiles import load_profile

torch.set_num_threads(1)
FEW = replace(
    QUICK,
    batches=(1, 3),
    contexts=(2,),
    prefills=(Chunks(1, 16), Chunks(1, 64)),
    rested=(Chunks(1, 4),),
    mixed_batches=(2,),
    mixed_context=3,
    mixed=(Chunks(1, 16),),
    beside=(2,),
    beside_batches=(1,),
    sources=(3, 5),
    compressed=(1, 2),
    swapped=(1, 3),
    sampled=(2,),
    repeats=2,
    steps=2,
)
FROM = ("--from", "m.json")
TINY = (
    "--model",
    "dummy:tiny",
    "--device",
    "cpu",
    "--block-size",
    "16",
    "--max-running",
    "4",
    "--kv-blocks",
    "100",
)


def test_it_measures_fits_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlab.engine.calibration.QUICK", FEW)
    kept = tmp_path / "measurements.json"
    result = zlab(
        "calibrate", *TINY, "--quick", "--out", str(tmp_path), "--measurements", str(kept)
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("cpu-*-tiny-float32.json")
    profile = load_profile(path)
    assert (profile.block_size, profile.window) == (16, 16)
    assert f"profile in {path}" in " ".join(result.stdout.split())
    for words in (
        "kv_read_token_s",
        "s per cached token read by a decode",
        "held out",
        "decode",
        "overlap",
        "swap",
    ):
        assert words in result.stdout
    assert "skipped host: without a GPU the host is the device" in result.stdout
    # fitted again from what was kept it is the same
    again = tmp_path / "again"
    again.mkdir()
    shown = zlab("calibrate", "--from", str(kept), "--out", str(again), "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["coefficients"] == json.loads(path.read_text())["coefficients"]
    assert load_profile(again / path.name) == profile


def test_measurements_of_a_gpu_become_its_profile(tmp_path: Path) -> None:
    measured = tmp_path / "m.json"
    measured.write_text(json.dumps(document(TRUTH, 0.0, 0)))
    result = zlab("calibrate", "--from", str(measured), "--out", str(tmp_path))
    assert result.exit_code == 0
    assert (
        "h200-qwen3-8b-bfloat16: NVIDIA H200, 2026-11-30, blocks of 256 tokens, window 16"
        in result.stdout
    )
    path = tmp_path / "h200-qwen3-8b-bfloat16.json"
    small = (
        "synth:fixed?num_requests=1&prompt=512&output=20&rate_per_s=1",
        "--profile",
        str(path),
        "--json",
    )
    replayed = zlab("replay", *small)
    assert replayed.exit_code == 0
    # alone: a step of 512 prompt tokens, then decodes that read 513 and more
    cost = CostModel(gpu="h200", model="qwen3-8b", source="made up", **TRUTH)
    prefill_s = cost.step_seconds(0, 0, 512, 512 * 513 // 2, 1)
    decode_s = cost.decode_seconds(1, 523)
    found = json.loads(replayed.stdout)
    ahead = tmp_path / "ahead"
    assert zlab("replay", *small, "--out", str(ahead)).exit_code == 0
    assert json.loads((ahead / "manifest.json").read_text())["plan_ahead"] is True
    assert found["ttft_s"]["p50"] == pytest.approx(prefill_s, rel=1e-4)
    assert found["tpot_s"]["p50"] == pytest.approx(decode_s, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either --model, to measure it, or --from FILE"),
        (
            ("--model", "dummy:tiny", "--from", "m.json"),
            "give either --model, to measure it, or --from FILE",
        ),
        (("--from", "nowhere.json"), "cannot read measurements nowhere.json"),
        (("--model", "dummy:tiny", "--out", "nowhere"), "--out nowhere: there is no such folder"),
        (
            (*FROM, "--measurements", "x"),
            "--from m.json measures nothing: --measurements x would do nothing",
        ),
        (
            (*FROM, "--device", "cpu"),
            "--from m.json measures nothing: --device cpu would do nothing",
        ),
        ((*FROM, "--dtype", "float32"), "measures nothing: --dtype float32 would do nothing"),
        ((*FROM, "--block-size", "256"), "measures nothing: --block-size 256 would do nothing"),
        ((*FROM, "--max-running", "256"), "measures nothing: --max-running 256 would do nothing"),
        ((*FROM, "--kv-blocks", "9"), "measures nothing: --kv-blocks 9 would do nothing"),
        (
            (*FROM, "--quick", "--seconds", "270"),
            "measures nothing: --quick and --seconds 270 would do nothing",
        ),
        (("--model", "dummy:tyni"), "unknown model shape 'tyni'; did you mean 'tiny'"),
        (("--model", "dummy:tiny", "--device", "tpu"), "no device 'tpu' here"),
        (("--model", "dummy:tiny", "--dtype", "half"), "unknown dtype 'half'"),
        (
            ("--model", "dummy:tiny", "--block-size", "24"),
            "block_size must be a multiple of 16 to be",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = zlab("calibrate", *arguments)
    assert result.exit_code == 2
    assert words in errors(result)
    assert result.stdout == ""


def test_what_is_not_given_is_left_to_the_settings() -> None:
    """The help repeats them."""
    assert MeasuringOptions().settings() == {}
    hints = get_type_hints(MeasuringOptions, include_extras=True)
    shown = {
        name: hints[name].__metadata__[0].show_default
        for name in ("block_size", "max_running", "seconds")
    }
    settings = CalibrationSettings("dummy:tiny")
    assert shown == {
        "block_size": f"{settings.block_size}", "max_running": f"{settings.max_running}",
        "seconds": f"{settings.limit_s:g}",
    }  # fmt: skip
    given = MeasuringOptions("cpu", "float32", 16, 4, 100, True, 5.0, Path("m.json"))
    assert CalibrationSettings("dummy:tiny", **given.settings()) == CalibrationSettings(
        "dummy:tiny", "cpu", "float32", None, 16, 4, 100, True, 5.0
    )
