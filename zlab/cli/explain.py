"""`zlab explain`: why a request of a recording took as long as it did, in words."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zlab.cli.console import MisuseError
from zlab.cli.options import AsJson
from zlab.traces.explanation import Explainer, request_by_name
from zlab.traces.recording import Recording

MOST_IDS = 3  # ids that an error names


def explain(
    run: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of the recording.")
    ],
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Number of the request (17 or r17), or its id.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say what a request waited for, which requests held that, and what it cost.

    The reasons are those that the scheduler wrote down in the recording.
    """
    recording = Recording(run)
    requests = recording.table("requests")
    row = request_by_name(requests, request)
    if row is None:
        ids = requests["id"].to_pylist()[:MOST_IDS]
        some = ", ".join(map(repr, ids)) + (", ..." if requests.num_rows > MOST_IDS else "")
        raise MisuseError(
            f"{run} has no request {request!r}; it has {requests.num_rows:,} requests: numbers 0 "
            f"to {requests.num_rows - 1} or ids {some}"
            if ids
            else f"{run} has no request yet"
        )
    explainer = Explainer(recording)
    in_short, events = explainer.in_short(row), explainer.explain(row)
    if as_json:
        found = {
            "request": row["number"],
            "id": row["id"],
            "in_short": in_short,
            "events": [asdict(event) for event in events],
        }
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{in_short}\n")
    for event in events:
        typer.echo(f"{event.time_s:>12,.3f} s  {event.words}")
