"""Where many simulations run: processes of this machine, or a Dask or Ray cluster through joblib's backends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pkgutil import resolve_name
from typing import Annotated

import typer
from joblib import parallel_config

from zlab.outcome import MisuseError


class Backend(StrEnum):
    """Joblib's name of where the work goes."""

    loky = "loky"
    dask = "dask"
    ray = "ray"


NEEDS = {Backend.dask: "distributed", Backend.ray: "ray"}

Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, show_default="one for each core or worker", help="Simulations at a time."),
]
BackendName = Annotated[
    Backend, typer.Option("--backend", help="loky: processes here; dask, ray: a cluster (their package must be there).")
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="ADDRESS", help="The cluster's address: tcp://host:8786 (Dask), auto (Ray)."),
]


@dataclass(frozen=True)
class SpreadOptions:
    """Over how many workers the runs are spread, and where those are."""

    jobs: Jobs = None
    backend: BackendName = Backend.loky
    cluster: Cluster = None

    @property
    def in_this_process(self) -> bool:
        """Whether one run after the other goes on here."""
        return self.jobs == 1 and self.backend is Backend.loky


@contextmanager
def spread(backend: Backend, jobs: int | None, cluster: str | None) -> Iterator[None]:
    """Within it `sim.parallel` uses that backend. Raises MisuseError when it cannot be reached."""
    options: dict[str, str] = {}
    if backend is Backend.loky:
        if cluster is not None:
            raise MisuseError(f"--cluster {cluster} needs --backend dask or ray")
        jobs = jobs or os.cpu_count() or 1
    else:
        _require(backend)
        if backend is Backend.ray:
            resolve_name("ray:init")(address=cluster, ignore_reinit_error=True)
            resolve_name("ray.util.joblib:register_ray")()
        elif cluster is None:
            raise MisuseError("--backend dask needs --cluster ADDRESS, its scheduler's, as tcp://host:8786")
        else:
            options["scheduler_host"] = cluster
    try:
        config = parallel_config(backend=str(backend), n_jobs=jobs or -1, **options)
    except (OSError, ValueError) as error:
        raise MisuseError(f"--backend {backend} --cluster {cluster}: {error}") from error
    with config:
        yield


def _require(backend: Backend) -> None:
    try:
        resolve_name(NEEDS[backend])
    except ModuleNotFoundError as error:
        raise MisuseError(
            f"--backend {backend} needs the package {NEEDS[backend]}: pip install {NEEDS[backend]}"
        ) from error
