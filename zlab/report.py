"""`zlab report`: recordings as one HTML page with the dashboard's figures, without a server."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from traces.recording import Recording
from zlab.outcome import MisuseError

NEEDS = ("plotly", "pandas")


def report(
    runs: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="Folders of recordings.")],
    out: Annotated[Path, typer.Option("--out", dir_okay=False, help="The page to write; replaced if it is there.")],
) -> None:
    """Write the dashboard's figures of one or several recordings as one HTML page.

    Needs the extra `dashboard`. For a picture of the blocks alone, which needs no extra, see `zlab demo`.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise MisuseError(f"zlab report needs {' and '.join(missing)}: pip install 'zipage-lab[dashboard]'")
    if not out.parent.is_dir():
        raise MisuseError(f"--out {out}: there is no folder {out.parent}")
    named = list(zip(names_of(runs), map(Recording, runs), strict=True))
    from dashboard.export import write_report

    write_report(named, out)
    typer.echo(f"{len(runs)} recording{'s' if len(runs) != 1 else ''} in {out}")


def names_of(runs: list[Path]) -> list[str]:
    """The folders' own names where they differ, else as much of their paths as tells them apart.

    Raises MisuseError when one folder stands twice.
    """
    full = [run.resolve() for run in runs]
    twice = next((run for run, path in zip(runs, full, strict=True) if full.count(path) > 1), None)
    if twice is not None:
        raise MisuseError(f"{twice} stands twice")
    length = 1
    while len({path.parts[-length:] for path in full}) < len(full):
        length += 1
    return ["/".join(path.parts[-length:]) for path in full]
