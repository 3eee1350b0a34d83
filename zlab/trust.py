"""`zlab trust`: simulate the engine's recordings again and say how far off the simulator is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from zlab.judged import as_document, judge_run
from zlab.options import AsJson
from zlab.outcome import WENT_WRONG
from zlab.tables import console
from zlab.trust_table import show_many, show_one


def trust(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", exists=True, file_okay=False, help="Recordings of `zlab bench --out`."),
    ],
    profile: Annotated[
        str | None,
        typer.Option("--profile", "--cost", show_default="that of the recording's card", help="Its name or FILE.json."),
    ] = None,
    with_roofline: Annotated[
        bool, typer.Option("--roofline", help="Also the error of the card's roofline, beside the profile's.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", show_default="by the recording's card", help="Row for the roofline.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Row or config.json for the roofline.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", dir_okay=False, help="Write everything to this JSON file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay recordings of the engine in simulation and report how far off the simulator is.

    Decisions: digests equal, or the first event that differs. Times: makespan, tokens/s, TTFT, TPOT and E2E of a free
    replay against what was measured, with the goals; and every recorded step priced by the cost model, by kind, with
    the part of the makespan that the model lacks. Without a profile the roofline of the card is judged.

    Several recordings of one workload also give Kendall's tau: does the simulator rank them as the engine does?
    Exit code 0: decisions are equal; 1: they differ, or a recording is damaged; 2: misuse.
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
