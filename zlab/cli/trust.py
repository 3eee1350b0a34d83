"""Recordings of the engine and what cost models are worth on them: what `zlab trust` shows, and its
JSON.

`zlab trust`: simulate the engine's recordings again and say how far off the simulator is.

What `zlab trust` prints.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zlab.cli.console import (
    MISSING,
    WENT_WRONG,
    MisuseError,
    console,
    count,
    figure,
    milliseconds,
    plain_table,
    share,
)
from zlab.cli.options import AsJson
from zlab.cli.parity import recorded_run
from zlab.sim.compare import kendall_tau
from zlab.sim.cost_model import CostModel, roofline
from zlab.sim.fidelity import MeasuredFigure, Trust, event_words, judge_fidelity
from zlab.sim.profiles import Profile, find_profile, from_profile, open_profile
from zlab.sim.recorded_run import RecordedRun
from zlab.sim.specs import SimError, find_gpu, find_model, gpu_of_card
from zlab.traces.workload import dropped_rows

COMPARED_VERSIONS = ("torch", "triton", "zipage-lab")


@dataclass(frozen=True)
class JudgedRecording:
    """One recording with what the cost model and, where asked for, the card's roofline are worth on
    it.
    """

    folder: Path
    run: RecordedRun
    with_profile: Trust | None
    with_roofline: Trust | None
    notes: tuple[str, ...]

    @property
    def chief(self) -> Trust:
        """By the profile where there is one."""
        found = self.with_profile or self.with_roofline
        assert found is not None
        return found


def judge_run(
    folder: Path,
    name: str | None,
    with_roofline: bool,
    gpu: str | None = None,
    model: str | None = None,
) -> JudgedRecording:
    """Judge a profile (by default that of the recording's card) on a recording, and the roofline
    where there is none.

    `gpu` and `model` name other rows for the roofline. Raises RecordingError, SimError,
    ProfileError or MisuseError.
    """
    run = recorded_run(folder)
    found: Profile | None
    if name is not None:
        found = open_profile(name)
        notes = check_profile(found, run)
    else:
        found, notes = own_profile(run, "the roofline is judged instead")
    card = gpu_of_card(str(run.manifest["gpu"]))
    guess = roofline_of(run, gpu or card, model) if with_roofline or found is None else None
    return JudgedRecording(
        folder=folder,
        run=run,
        with_profile=None if found is None else judge_fidelity(run, from_profile(found)),
        with_roofline=None if guess is None else judge_fidelity(run, guess),
        notes=(*notes, *dropped_rows(run.manifest.get("workload", {}).get("rows"))),
    )


def own_profile(run: RecordedRun, otherwise: str) -> tuple[Profile | None, list[str]]:
    """The profile of a recording's own card, model and dtype, with what to say about it.

    None where nobody has measured that, or with other blocks or another window; why, and what
    happens `otherwise`.
    """
    card, manifest = gpu_of_card(str(run.manifest["gpu"])), run.manifest
    try:
        found = find_profile(card, str(manifest["model"]), str(manifest["engine"]["dtype"]))
        return found, check_profile(found, run)
    except SimError as error:
        return None, [f"{error}; {otherwise}"]


def check_profile(profile: Profile, run: RecordedRun) -> list[str]:
    """What differs between profile and recording and may matter. Raises SimError where they do not
    belong together.
    """
    dtype = run.manifest["engine"]["dtype"]
    wanted = {
        "gpu": (profile.gpu, gpu_of_card(str(run.manifest["gpu"]))),
        "model": (profile.model, run.manifest["model"]),
        "dtype": (profile.dtype, dtype),
    }
    if run.compression_tasks:
        wanted["block size"] = (str(profile.block_size), str(run.limits.block_size))
        wanted["window"] = (str(profile.window), str(run.policy.compression.window))
    differ = [
        f"{name} {ours}, recorded with {theirs}"
        for name, (ours, theirs) in wanted.items()
        if ours != theirs
    ]
    if differ:
        raise SimError(
            f"profile {profile.name} does not belong to {run.folder}: {'; '.join(differ)}"
        )
    versions = run.manifest.get("versions", {})
    return [
        f"the profile was measured with {name} {profile.versions[name]}, the run with "
        f"{versions[name]}"
        for name in COMPARED_VERSIONS
        if name in profile.versions
        and name in versions
        and profile.versions[name] != versions[name]
    ]


def roofline_of(run: RecordedRun, gpu: str, model: str | None) -> CostModel:
    """The roofline of a card for a recording's policy and blocks. Raises MisuseError where there is
    no such row.
    """
    try:
        row, shape = find_gpu(gpu), find_model(model or str(run.manifest["model"]))
    except SimError as error:
        raise MisuseError(
            f"{run.folder} has no roofline: {error} (--gpu and --model name another, --profile "
            f"measured costs)"
        ) from error
    return roofline(
        row,
        shape,
        window=run.policy.window(run.limits.block_size),
        block_size=run.limits.block_size,
    )


def as_document(judged: list[JudgedRecording]) -> dict[str, Any]:
    """Everything as plain JSON."""
    return {"runs": [_run_document(each) for each in judged], "ranking": _ranking(judged)}


def _run_document(judged: JudgedRecording) -> dict[str, Any]:
    manifest = judged.run.manifest
    return {
        "run": judged.folder.name,
        "policy": manifest["policy"],
        "policy_digest": manifest["policy_digest"],
        "workload": manifest.get("workload"),
        "workload_sha256": manifest.get("workload_sha256"),
        "limits": manifest["limits"],
        "card": manifest["gpu"],
        "model": manifest["model"],
        "complete": judged.run.complete,
        "planned_ahead": judged.run.planned_ahead,
        "notes": list(judged.notes),
        "profile": None if judged.with_profile is None else _trust_document(judged.with_profile),
        "roofline": None if judged.with_roofline is None else _trust_document(judged.with_roofline),
    }


def _trust_document(found: Trust) -> dict[str, Any]:
    document = asdict(found)
    document["decisions"]["equal"] = found.decisions.equal
    for name, compared in found.figures.items():
        document["figures"][name] |= {"error": compared.error, "met": compared.met}
    document["pinned_makespan"]["error"] = found.pinned_makespan.error
    for kind, error in found.steps.items():
        document["steps"][kind]["error"] = error.error
    return document


def _ranking(judged: list[JudgedRecording]) -> dict[str, float | None] | None:
    """Kendall's tau of tokens/s; None for a single run."""
    if len(judged) < 2:
        return None
    found: dict[str, float | None] = {}
    for name in ("with_profile", "with_roofline"):
        sides = [getattr(each, name) for each in judged]
        if all(side is not None for side in sides):
            rates = [side.figures["tokens_per_s"] for side in sides]
            found[name.removeprefix("with_")] = kendall_tau(
                [rate.measured for rate in rates], [rate.simulated for rate in rates]
            )
    return found


LABELS = {"makespan_s": "makespan, s", "tokens_per_s": "output tokens/s"}
WORDS = {"ttft_s": "TTFT, s,", "tpot_s": "TPOT, ms,", "e2e_s": "E2E, s,"}
ROW_FIGURES = {  # how the error of a figure is headed where every run has a line
    "tokens_per_s": "tok/s",
    "makespan_s": "makespan",
    "ttft_s p50": "TTFT p50",
    "ttft_s p99": "p99",
    "tpot_s p50": "TPOT p50",
    "e2e_s p50": "E2E p50",
    "e2e_s p99": "p99",
}


def _signed(value: float | None) -> str:
    return MISSING if value is None else f"{value:+.1%}"


def _goal(compared: MeasuredFigure) -> str:
    if compared.met is None:
        return "" if compared.goal is None else MISSING
    return f"{compared.goal:.0%} {'met' if compared.met else 'NOT MET'}"


def _show_decisions(found: Trust, to: Console) -> None:
    decisions = found.decisions
    same = "equal" if decisions.equal else "[bold]DIFFER[/]"
    to.print(f"decisions ({decisions.how}): {same}, digest {decisions.engine_digest[:16]}")
    if not decisions.equal:
        if decisions.difference is None:
            to.print("the same events name other blocks")
        else:
            to.print(
                f"the first that differs is in step {decisions.difference.step}: engine "
                f"{escape(event_words(decisions.difference.left))}, simulator "
                f"{escape(event_words(decisions.difference.right))}"
            )
    if decisions.free_differs_at is not None:
        to.print(
            f"on its own clock the simulator first decides otherwise in step "
            f"{decisions.free_differs_at:,}"
        )


def show_one(judged: JudgedRecording, to: Console) -> None:
    """One recording: decisions, figures with their goals, and where the time goes that the model
    lacks.
    """
    found, guess = judged.chief, judged.with_roofline if judged.with_profile is not None else None
    manifest = judged.run.manifest
    to.print(
        f"[bold]{escape(manifest['policy'])}[/] on {escape(str(manifest['gpu']))} with "
        f"{manifest['model']}: "
        f"{judged.run.requests.num_rows:,} requests, {judged.run.steps.num_rows:,} steps"
        + ("" if judged.run.complete else ", cut short: compared over as many steps")
    )
    to.print(f"costs: {escape(found.source)}")
    for note in judged.notes:
        to.print(f"note: {escape(note)}")
    _show_decisions(found, to)
    to.print()
    columns = (
        "",
        "measured",
        "simulated",
        "error",
        "goal",
        *(["roofline's error"] if guess is not None else []),
    )
    table = plain_table(*columns)
    for name, compared in found.figures.items():
        show = milliseconds if name.startswith("tpot") else figure
        which, _, mark = name.partition(" ")
        label = LABELS.get(which) or f"{WORDS[which]} {mark}"
        extra = [_signed(guess.figures[name].error)] if guess is not None else []
        cells = (
            show(compared.measured),
            show(compared.simulated),
            _signed(compared.error),
            _goal(compared),
        )
        table.add_row(label, *cells, *extra)
    to.print(table)
    to.print()
    _show_steps(found, guess, to)


def _show_steps(found: Trust, guess: Trust | None, to: Console) -> None:
    """Where the time goes that the model lacks."""
    extra = ["roofline's error"] if guess is not None else []
    table = plain_table(
        "steps", "number", "measured, s", "between, s", "error", "mean size", "lacks of all", *extra
    )
    for kind, error in found.steps.items():
        table.add_row(
            kind,
            count(error.num_steps),
            figure(error.measured_s),
            figure(error.between_s),
            _signed(error.error),
            share(error.mean_size),
            _signed(error.lacking_share),
            *([_signed(guess.steps[kind].error)] if guess is not None else []),
        )
    to.print(table)
    pinned = found.pinned_makespan
    to.print(
        f"the engine's own steps, priced: {figure(pinned.simulated)} s of "
        f"{figure(pinned.measured)} s "
        f"({_signed(pinned.error)}), {figure(found.idle_s)} s of them idle"
    )
    for outlier in found.outliers:
        to.print(
            f"step {outlier.step:,} ({outlier.kind}) took {milliseconds(outlier.measured_s)} ms, "
            f"predicted {milliseconds(outlier.predicted_s)}"
        )


def show_many(
    judged: list[JudgedRecording], ranking: dict[str, float | None] | None, to: Console
) -> None:
    """A line a recording: tokens/s and errors; and how alike the two rankings are."""
    table = plain_table("run", "decisions", "measured", "simulated", *ROW_FIGURES.values())
    for each in judged:
        found = each.chief
        rate = found.figures["tokens_per_s"]
        table.add_row(
            escape(each.folder.name),
            "equal" if found.decisions.equal else "[bold]DIFFER[/]",
            figure(rate.measured),
            figure(rate.simulated),
            *(_signed(found.figures[name].error) for name in ROW_FIGURES),
        )
    to.print(table)
    for name, tau in (ranking or {}).items():
        to.print(f"Kendall's tau of tokens/s, {name}: {MISSING if tau is None else f'{tau:.3f}'}")
    for each in judged:
        if not each.chief.decisions.equal:
            to.print(escape(str(each.folder)))
            _show_decisions(each.chief, to)
    for note in sorted({note for each in judged for note in each.notes}):
        to.print(f"note: {escape(note)}")


def trust(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", exists=True, file_okay=False, help="Recordings of `zlab bench --out`."
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "--cost",
            show_default="that of the recording's card",
            help="Its name or FILE.json.",
        ),
    ] = None,
    with_roofline: Annotated[
        bool,
        typer.Option(
            "--roofline", help="Also the error of the card's roofline, beside the profile's."
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", show_default="by the recording's card", help="Row for the roofline."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Row or config.json for the roofline.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", dir_okay=False, help="Write everything to this JSON file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay recordings of the engine in simulation and report how far off the simulator is.

    Decisions: digests equal, or the first event that differs. Times: makespan, tokens/s, TTFT, TPOT
    and E2E of a free replay against what was measured, with the goals; and every recorded step
    priced by the cost model, by kind, with the part of the makespan that the model lacks. Without a
    profile the roofline of the card is judged.

    Several recordings of one workload also give Kendall's tau: does the simulator rank them as the
    engine does? Exit code 0: decisions are equal; 1: they differ, or a recording is damaged; 2:
    misuse.
    """
    judged = [judge_run(folder, profile, with_roofline, gpu, model) for folder in runs]
    document = as_document(judged)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if as_json:
        typer.echo(json.dumps(document))
    else:
        to = console()
        if len(judged) == 1:
            show_one(judged[0], to)
        else:
            show_many(judged, document["ranking"], to)
    if not all(each.chief.decisions.equal for each in judged):
        raise typer.Exit(WENT_WRONG)
