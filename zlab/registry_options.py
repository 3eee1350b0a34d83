"""Options that the commands of the registry share."""

import getpass
import os
from pathlib import Path
from typing import Annotated

import typer

from policies.evidence import Target
from policies.registry import DEFAULT
from sim.hardware import find_gpu, find_model
from zlab.outcome import MisuseError

RegistryPath = Annotated[
    Path, typer.Option("--registry", dir_okay=False, envvar="ZLAB_REGISTRY", help="The registry's file.")
]
DEFAULT_REGISTRY = Path(DEFAULT)
Who = Annotated[str | None, typer.Option("--who", help="Who does it; the user's name if not given.")]
Why = Annotated[str, typer.Option("--why", help="The reason, for the history.")]
LiveUrl = Annotated[
    str | None,
    typer.Option("--live", metavar="URL", help="Also tell the server that runs there, as http://127.0.0.1:8000."),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", exists=True, dir_okay=False, help="Holds the server's admin key; else $ZLAB_ADMIN_KEY."
    ),
]


def signed_by(who: str | None) -> str:
    """The name given, or that of the user whose process this is."""
    if who is not None:
        if not who.strip():
            raise MisuseError("--who needs a name")
        return who
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}"


def target_of(model: str, gpu: str) -> Target:
    """Where it is about. Raises SimError, with the nearest known one, on a model or card that nobody knows."""
    return Target(find_model(model).name, find_gpu(gpu).name)
