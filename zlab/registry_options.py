"""Options that the commands of the registry share."""

import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from policies.evidence import Target
from policies.registry import DEFAULT, Registry
from sim.hardware import find_gpu, find_model
from zlab.live import KEY_NAME, LiveServer, open_server
from zlab.options import AsJson
from zlab.outcome import MisuseError

RegistryPath = Annotated[
    Path, typer.Option("--registry", dir_okay=False, envvar="ZLAB_REGISTRY", help="The registry's file.")
]
DEFAULT_REGISTRY = Path(DEFAULT)
Who = Annotated[str | None, typer.Option("--who", show_default="the user's name", help="Who does it.")]
Why = Annotated[str, typer.Option("--why", help="The reason, for the history.")]
LiveUrl = Annotated[
    str | None,
    typer.Option("--live", metavar="URL", help="Also tell the server that runs there, as http://127.0.0.1:8000."),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        exists=True,
        dir_okay=False,
        show_default=f"${KEY_NAME}",
        help="Holds the admin key of --live.",
    ),
]


@dataclass(frozen=True)
class ChangeOptions:
    """Who changes what serves, why, and whether a running server is told."""

    why: Why = ""
    who: Who = None
    live: LiveUrl = None
    admin_key_file: AdminKeyFile = None
    as_json: AsJson = False

    def server(self) -> LiveServer | None:
        """The server to tell, if one is to be told. Raises MisuseError on an address or key that cannot be."""
        if self.live is None:
            if self.admin_key_file is not None:
                raise MisuseError(
                    f"--admin-key-file {self.admin_key_file} is for the server of --live, and none is named"
                )
            return None
        return open_server(self.live, self.admin_key_file)

    def check_reason(self, force: bool) -> None:
        """Raise MisuseError on force without a reason."""
        if force and not self.why.strip():
            raise MisuseError("--force needs --why: the reason is kept in the history")


def registry_at(path: Path, create: bool = False) -> Registry:
    """The registry of a file. Raises MisuseError where it is not there and not to be made, RegistryError on another."""
    if not create and not path.exists():
        raise MisuseError(f"no registry at {path}: `zlab validate ... --registry {path}` makes one")
    if not path.parent.is_dir():
        raise MisuseError(f"--registry {path}: there is no folder {path.parent}")
    return Registry(path, create)


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
