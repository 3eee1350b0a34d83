"""`zlab calibrate`: measure a model on the device at hand, and fit the simulator's costs to it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from zlab.cli.console import MisuseError, console, count, figure, plain_table, share
from zlab.cli.options import AsJson, Device, Dtype, engine_room, with_groups
from zlab.sim.cost_model import COEFFICIENT_UNITS
from zlab.sim.fitting import fit
from zlab.sim.profiles import PROFILES, Profile, parse_measurements, read_measurements, save_profile

MOST_SKIPPED_SHOWN = 8


@dataclass(frozen=True)
class MeasuringOptions:
    """How a model is measured; what is None is left to
    `zlab.engine.calibration.CalibrationSettings`.
    """

    device: Device = None
    dtype: Dtype = None
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", min=1, show_default="256", help="Tokens in a block."),
    ] = None
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running", min=1, show_default="256", help="Largest batch that is measured."
        ),
    ] = None
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            "--kv-blocks", min=1, show_default="all that fit on a GPU", help="Blocks in the pool."
        ),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=1.0, show_default="270", help="Begin no measurement after this time."
        ),
    ] = None
    keep: Annotated[
        Path | None,
        typer.Option(
            "--measurements", dir_okay=False, help="Write what was measured to this file, too."
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Fields of `CalibrationSettings` that are given."""
        fields = {
            "device": self.device,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_running": self.max_running,
            "num_blocks": self.kv_blocks,
            "quick": self.quick or None,
            "limit_s": self.seconds,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def check_unused(self, measured: Path) -> None:
        """Raise MisuseError where one is given although all measurements lie in a file."""
        options = {
            "--device": self.device,
            "--dtype": self.dtype,
            "--block-size": self.block_size,
            "--max-running": self.max_running,
            "--kv-blocks": self.kv_blocks,
            "--seconds": None if self.seconds is None else f"{self.seconds:g}",
            "--measurements": self.keep,
        }
        given = ["--quick"] if self.quick else []
        given += [f"{option} {value}" for option, value in options.items() if value is not None]
        if given:
            raise MisuseError(
                f"--from {measured} measures nothing: {' and '.join(given)} would do nothing"
            )


@with_groups
def calibrate(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="As of `zlab bench`: smollm2, a folder, FILE.gguf, dummy:qwen3-8b ...",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--from", dir_okay=False, help="Instead: fit measurements that lie in this file."
        ),
    ] = None,
    measuring: MeasuringOptions,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            file_okay=False,
            help="Folder for the profile; where --profile looks, by default.",
        ),
    ] = PROFILES,
    as_json: AsJson = False,
) -> None:
    """Measure steps, compressions and copies of a model on this device, and write a profile for the
    simulator.

    The profile is `OUT/<gpu>-<model>-<dtype>.json`: coefficients of a small physical model with
    their units, card, date, versions, and how far they are off, on what they were fitted to and on
    what they were not. `zlab replay
    --profile` then uses it, and `zlab trust` says what it is worth. What the device lacks is
    skipped, and named.
    """
    if (model is None) == (measured is None):
        raise MisuseError(
            "give either --model, to measure it, or --from FILE, to fit what was measured"
        )
    if measured is not None:
        measuring.check_unused(measured)
    if out == PROFILES:
        out.mkdir(exist_ok=True)  # a clone that has no profile yet has no folder for them
    if not out.is_dir():
        raise MisuseError(f"--out {out}: there is no such folder")
    if measured is not None:
        found, skipped = read_measurements(measured), []
    else:
        document = _measure({"model": model} | measuring.settings(), silent=as_json)
        if measuring.keep is not None:
            measuring.keep.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        found, skipped = parse_measurements(document), document["skipped"]
    profile = fit(found)
    path = save_profile(profile, out)
    if as_json:
        typer.echo(path.read_text("utf-8"), nl=False)
        return
    _show(profile, skipped)
    typer.echo(f"profile in {path}")


def _measure(given: dict[str, Any], silent: bool) -> dict[str, Any]:
    with engine_room():
        from zlab.engine.calibration import CalibrationSettings, measure

        to = console()
        settings = CalibrationSettings(**given)
        if silent or not to.is_terminal:
            return measure(settings)
        with to.status("calibrating") as status:
            return measure(settings, note=lambda text: status.update(escape(text)))


def _show(profile: Profile, skipped: list[dict[str, str]]) -> None:
    to = console()
    to.print(
        f"[bold]{escape(profile.name)}[/]: {escape(profile.card)}, {profile.date}, "
        f"blocks of {profile.block_size} tokens, window {profile.window}"
    )
    table = plain_table("coefficient", "value", "unit")
    for name, unit in COEFFICIENT_UNITS.items():
        table.add_row(name, f"{profile.coefficients[name]:.4g}", unit)
    to.print(table)
    errors = plain_table("error", "cells", "mean", "largest", "mean, held out", "largest, held out")
    for part, error in profile.fit_error.items():
        other = profile.held_out_error.get(part)
        errors.add_row(
            part,
            count(error.num_points),
            share(error.mean_relative),
            share(error.max_relative),
            share(None if other is None else other.mean_relative),
            share(None if other is None else other.max_relative),
        )
    to.print(errors)
    also = plain_table("also measured", "value", "unit")
    for name, other_figure in profile.also.items():
        value = other_figure.value
        also.add_row(
            name, figure(value) if 0.01 <= value < 1e6 else f"{value:.4g}", other_figure.unit
        )
    to.print(also)
    for row in skipped[:MOST_SKIPPED_SHOWN]:
        to.print(escape(f"skipped {row['what']}: {row['reason']}"))
    if len(skipped) > MOST_SKIPPED_SHOWN:
        to.print(f"and {len(skipped) - MOST_SKIPPED_SHOWN} more cells")
