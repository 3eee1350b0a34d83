"""Profiles on disk: written and read back the same, and read strictly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zlab.sim.cost_model import COEFFICIENT_UNITS, roofline
from zlab.sim.profiles import (
    PROFILES,
    FitError,
    Profile,
    ProfileError,
    ProfileFigure,
    check_shape,
    find_profile,
    from_profile,
    load_profile,
    open_profile,
    profile_names,
    save_profile,
)
from zlab.sim.specs import GPUS, MODELS

SHARES = ("compression_share", "compression_rate")
GUESS = roofline(GPUS["h200"], MODELS["qwen3-8b"])


@pytest.fixture
def invented() -> Profile:
    """For these tests only: the roofline's figures, a tenth slower. Nobody measured this."""
    return Profile(
        gpu="h200",
        model="qwen3-8b",
        shape=MODELS["qwen3-8b"].profile_shape,
        dtype="bfloat16",
        card="invented for a test",
        date="2026-01-31",
        versions={"torch": "0.0", "zipage-lab": "0.1.0"},
        block_size=256,
        window=16,
        coefficients={
            name: getattr(GUESS, name) * (1.0 if name in SHARES else 1.1)
            for name in COEFFICIENT_UNITS
        },
        fit_error={"decode": FitError(0.01, 0.04, 48), "prefill": FitError(0.02, 0.05, 30)},
        held_out_error={"decode": FitError(0.02, 0.05, 48), "prefill": FitError(0.03, 0.06, 30)},
        also={"host_step_s": ProfileFigure(0.0012, "s per step")},
    )


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path, invented: Profile) -> None:
    path = save_profile(invented, tmp_path)
    assert path.name == "h200-qwen3-8b-bfloat16.json"
    assert load_profile(path) == invented
    assert find_profile("h200", "qwen3-8b", folder=tmp_path) == invented
    assert open_profile("h200-qwen3-8b-bfloat16", tmp_path) == open_profile(str(path)) == invented
    assert profile_names(tmp_path) == ("h200-qwen3-8b-bfloat16",)


def test_its_cost_model_has_exactly_its_coefficients(invented: Profile) -> None:
    cost = from_profile(invented)
    assert {name: getattr(cost, name) for name in COEFFICIENT_UNITS} == invented.coefficients
    assert cost.source == "h200-qwen3-8b-bfloat16 2026-01-31"
    assert cost.decode_seconds(64, 131_072) == pytest.approx(
        1.1 * GUESS.decode_seconds(64, 131_072)
    )


def test_what_nobody_measured_is_named_beside_what_there_is(
    tmp_path: Path, invented: Profile
) -> None:
    with pytest.raises(
        ProfileError,
        match=r"unknown measured profile 'h100-qwen3-8b-bfloat16' .choices: or FILE\.json",
    ):
        find_profile("h100", "qwen3-8b", folder=tmp_path / "nowhere")
    save_profile(invented, tmp_path)
    with pytest.raises(ProfileError, match="did you mean 'h200-qwen3-8b-bfloat16'"):
        find_profile("h100", "qwen3-8b", folder=tmp_path)


def test_a_profile_of_another_shape_is_stale(invented: Profile) -> None:
    check_shape(invented, MODELS["qwen3-8b"])
    with pytest.raises(
        ProfileError,
        match=r"is stale: .*\(num_layers 36 there, 35 here; vocab 151936 there, 7 here",
    ):
        check_shape(invented, replace(MODELS["qwen3-8b"], num_layers=35, vocab_size=7))
    with pytest.raises(ProfileError, match=r"another shape \(2 bytes a value there, 4 here\)"):
        check_shape(invented, replace(MODELS["qwen3-8b"], dtype_bytes=4))


def test_every_profile_that_ships_can_be_read() -> None:
    for name in profile_names():
        assert load_profile(PROFILES / f"{name}.json").name == name


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("windows", value=1), "unknown key 'windows'; did you mean 'window'"),
        (
            put("coefficients", "step", value={}),
            r"coefficients: unknown key 'step'; did you mean 'step_s'",
        ),
        (
            put("coefficients", "step_s", "units", value="s"),
            r"step_s: unknown key 'units'; did you mean 'unit'",
        ),
        (drop("coefficients", "swap_token_s"), "coefficients: missing 'swap_token_s'"),
        (drop("card"), "missing 'card'"),
        (
            put("format", value="zlab-profile/4"),
            "format is 'zlab-profile/4', this version reads 'zlab-profile/3'$",
        ),
        (
            put("format", value="zlab-profile/1"),
            r"format is 'zlab-profile/1', .*; fit its measurements again \(zlab calibrate --from FILE\)",
        ),
        (
            put("coefficients", "corner", "value", value=1.5),
            "corner must lie between 0 and 1, got 1.5",
        ),
        (
            put("coefficients", "step_s", "unit", value="ms"),
            "step_s: unit is 'ms', expected 's per step'",
        ),
        (
            put("coefficients", "step_s", "value", value=-1),
            "step_s.value: must be a finite number of at least 0, got -1",
        ),
        (
            put("coefficients", "step_s", "value", value=float("nan")),
            "step_s.value: must be a finite number",
        ),
        (
            put("coefficients", "compression_share", "value", value=1),
            "compression_share must lie between 0 and 1",
        ),
        (put("coefficients", value=[]), r"coefficients: must be an object, got \[\]"),
        (put("dtype", value="int4"), "dtype: 'int4' is unknown; choices: bfloat16"),
        (put("dtype", value=["bfloat16"]), "dtype: .* is unknown; choices: bfloat16"),
        (put("date", value="31.1.2026"), "date: must be YYYY-MM-DD, got '31.1.2026'"),
        (put("versions", value={}), "versions: must be an object of name: version"),
        (put("versions", "torch", value=2.1), "versions.torch: must be a text"),
        (put("window", value=0), "window: must be a positive whole number, got 0"),
        (drop("shape", "vocab"), "shape: missing 'vocab'"),
        (
            put("shape", "hidden", value=4096.0),
            "shape.hidden: must be a positive whole number, got 4096.0",
        ),
        (put("also", "host_step_s", value=0.1), "also.host_step_s: must be an object, got 0.1"),
        (
            put("held_out_error", value={}),
            "held_out_error: must state at least one of decode, prefill",
        ),
        (put("fit_error", value={}), "fit_error: must state at least one of decode, prefill"),
        (
            put("fit_error", "decodes", value={}),
            "fit_error: unknown key 'decodes'; did you mean 'decode'",
        ),
        (
            put("fit_error", "decode", "mean_relative", value=0.5),
            "mean_relative 0.5 is above max_relative 0.04",
        ),
        (
            put("gpu", value="h100"),
            "holds 'h100-qwen3-8b-bfloat16' and must be named h100-qwen3-8b-bfloat16.json",
        ),
    ],
)
def test_reading_is_strict(
    tmp_path: Path, invented: Profile, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = save_profile(invented, tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_unreadable_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read profile .*gone\.json"):
        load_profile(tmp_path / "gone.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"broken\.json: not JSON"):
        load_profile(broken)


def test_a_later_measurement_replaces_the_file(tmp_path: Path, invented: Profile) -> None:
    save_profile(invented, tmp_path)
    later = replace(invented, date="2026-02-01")
    assert load_profile(save_profile(later, tmp_path)) == later
