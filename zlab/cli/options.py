"""Options that several commands share, those that belong together in groups (`zlab.cli.options`).

Options that belong together, stated once: a dataclass as one parameter of a command stands for all
its fields.

What the commands that run a real model share: options, how they become settings, how the engine's
errors end.

Options that the commands of the registry share.

Where many simulations run: processes of this machine, or a Dask or Ray cluster through joblib's
backends.
"""

import getpass
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, TypeGuard, get_type_hints

import typer
from joblib import parallel_config

from zlab.cli.client import KEY_NAME, LiveServer, open_server
from zlab.cli.console import MisuseError
from zlab.cli.workloads import WorkloadSource
from zlab.engine.errors import EngineError
from zlab.policies.core.policy import Policy
from zlab.policies.evidence import Target
from zlab.policies.registry import DEFAULT, PolicyRegistry
from zlab.sim.cost_model import check_order, read_change
from zlab.sim.replay import DEFAULT_BLOCK_SIZE, DEFAULTS, Scenario
from zlab.sim.specs import GPUS, MODELS, find_gpu, find_model
from zlab.traces.formats.reader import FORMATS
from zlab.traces.synthetic import KINDS, PREFIX

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace file in any known format (.gz too), or a made-up workload: "
        f"{PREFIX}KIND?key=value&..., as {PREFIX}amc23?samples=4&seed=1 (kinds: "
        f"{', '.join(KINDS)}).",
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        help="A preset, FILE.toml, or FILE.py:Class; vary it with :key=value,... (see `zlab "
        "policy list`).",
    ),
]
PolicyNames = Annotated[
    list[str],
    typer.Option(
        "--policy",
        "-p",
        help="A policy as in `zlab replay`; repeat it, the first is what others are set against.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="STEP:POLICY",
        help="Before that step another policy takes over; repeat it for several.",
    ),
]


def parse_changes(specs: Sequence[str] | None) -> tuple[tuple[int, Policy], ...]:
    """Return what `--change` names as (step, policy) pairs. Raises SimError and PolicyError."""
    changes = [read_change(spec) for spec in specs or ()]
    check_order(changes)
    return tuple((change.step, change.policy) for change in changes)


GpuName = Annotated[str, typer.Option("--gpu", help=f"A card: {', '.join(GPUS)}.")]
ModelName = Annotated[
    str,
    typer.Option(
        "--model", help=f"{', '.join(MODELS)}, or the path of a Hugging Face config.json."
    ),
]
KvBlocks = Annotated[
    int | None,
    typer.Option("--kv-blocks", min=1, show_default="as many as fit", help="Blocks in the pool."),
]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")]
MaxBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-batched-tokens", min=1, show_default="8192", help="Most tokens of one step."
    ),
]
MaxRunning = Annotated[
    int | None,
    typer.Option("--max-running", min=1, show_default="256", help="Most running requests."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        show_default="the model's limit",
        help="Most tokens of a request, prompt and output.",
    ),
]
HostBlocks = Annotated[
    int | None,
    typer.Option(
        "--host-blocks", min=0, show_default="0", help="Blocks of host memory for swapped requests."
    ),
]
MemoryUtilisation = Annotated[
    float | None,
    typer.Option(
        "--memory-utilisation",
        show_default="0.9",
        help="Share of the card's memory to use, without --kv-blocks.",
    ),
]
LengthMultiplier = Annotated[
    float,
    typer.Option(
        "--length-multiplier",
        help="Outputs longer by this factor where the request gets compressed.",
    ),
]
LengthProfile = Annotated[
    str | None,
    typer.Option(
        "--length-profile",
        metavar="FILE",
        help="How much longer outputs get under the policy and its budget, as `zlab evaluate` "
        "measures it; where nothing is known, lengths stay and the command says so.",
    ),
]
BreakEvenSearch = Annotated[
    bool,
    typer.Option(
        "--break-even/--no-break-even",
        help="Search how much longer outputs may get before a compressing policy finishes no more "
        "requests a second (some further simulations a policy).",
    ),
]
Cost = Annotated[
    str | None,
    typer.Option(
        "--cost",
        "--profile",
        metavar="PROFILE",
        help="Measured costs instead of the card's roofline: a name in sim/measured, or "
        "FILE.json (docs/COST.md).",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help=f"The trace's format, if not by its columns: {', '.join(FORMATS)}."
    ),
]
SkipBadRows = Annotated[
    bool,
    typer.Option(
        "--skip-bad-rows", help="Leave bad rows of the trace out and count them by reason."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", file_okay=False, help="New folder for the recording of the run."),
]
PerfettoFile = Annotated[
    Path | None,
    typer.Option(
        "--perfetto", dir_okay=False, help="Write a Chrome trace for ui.perfetto.dev, a .json file."
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds",
        min=1,
        help=f"Workloads to make up, one a seed, counting from the spec's; {PREFIX} only.",
    ),
]


@dataclass(frozen=True)
class SizeOptions:
    """The pool, and what bounds a step and a request."""

    kv_blocks: KvBlocks = DEFAULTS.kv_blocks
    block_size: BlockSize = DEFAULTS.block_size
    max_batched_tokens: MaxBatchedTokens = DEFAULTS.max_batched_tokens
    max_running: MaxRunning = DEFAULTS.max_running
    max_model_len: MaxModelLen = DEFAULTS.max_model_len
    host_blocks: HostBlocks = DEFAULTS.host_blocks


@dataclass(frozen=True)
class ScenarioOptions:
    """All that a simulation needs besides its workload and its policy."""

    gpu: GpuName = DEFAULTS.gpu
    model: ModelName = DEFAULTS.model
    sizes: SizeOptions = SizeOptions()
    memory_utilisation: MemoryUtilisation = DEFAULTS.memory_utilisation
    length_multiplier: LengthMultiplier = DEFAULTS.length_multiplier
    length_profile: LengthProfile = DEFAULTS.length_profile
    cost: Cost = DEFAULTS.cost

    def scenario(self, policy: str = DEFAULTS.policy) -> Scenario:
        """With a policy."""
        return Scenario(
            policy=policy,
            gpu=self.gpu,
            model=self.model,
            memory_utilisation=self.memory_utilisation,
            length_multiplier=self.length_multiplier,
            length_profile=self.length_profile,
            cost=self.cost,
            **asdict(self.sizes),
        )


@dataclass(frozen=True)
class ReadingOptions:
    """How a trace is read."""

    format: Format = None
    skip_bad_rows: SkipBadRows = False

    def source(self, trace: str) -> WorkloadSource:
        """A trace, or a made-up workload, to be read so."""
        return WorkloadSource(trace, self.format, self.skip_bad_rows)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer should see it: in the place of a parameter that is a dataclass stand its
    fields.

    A field is annotated as a parameter would be, `Annotated[int, typer.Option(...)]`, and has a
    default; it may itself be a dataclass of options. No two may have the same name. The command is
    called with the dataclasses made.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: one.annotation
        for name, one in signature.parameters.items()
        if _is_group(one.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        flat += (
            _options(groups[name])
            if name in groups
            else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )

    @wraps(command)
    def called(**given: Any) -> None:
        made = {name: _made(group, given) for name, group in groups.items()}
        own = {name: given[name] for name in signature.parameters if name not in groups}
        command(**made, **own)

    called.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in flat} | {"return": None}
    return called


def _is_group(annotation: Any) -> TypeGuard[type[Any]]:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for item in fields(group):
        if _is_group(hint := hints[item.name]):
            yield from _options(hint)
        else:
            assert item.default is not MISSING, f"{group.__name__}.{item.name} has no default"
            yield inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hint
            )


def _made(group: type[Any], given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(group)
    return group(
        **{
            name: _made(hint, given) if _is_group(hint) else given[name]
            for name, hint in hints.items()
        }
    )


EXTRAS = {  # by what is missing; all else that these commands need comes with [engine]
    "fastapi": "server",
    "starlette": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
    "ray": "replicas",
    "scipy": "evaluate",
    "httpx": "evaluate",
}
DEFAULT_MODEL = "smollm2"

EngineModel = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="smollm2, tiny-reasoner, a Hugging Face folder, a .gguf file, or random weights: "
        "dummy:NAME (dummy:tiny, dummy:qwen3-8b) or dummy:CONFIG.json.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", show_default="cuda where there is one", help="cpu or cuda."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        show_default="bfloat16 on cuda, else float32",
        help="float32, bfloat16 or float16.",
    ),
]
MemoryShare = Annotated[
    float | None,
    typer.Option(
        "--memory-utilisation",
        show_default="0.9",
        help="Share of the GPU's memory to use, without --kv-blocks; on a CPU the pool is 1 GiB.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Fixes what is drawn.")]


@contextmanager
def engine_room() -> Iterator[None]:
    """While entered, what the engine refuses is misuse, and a missing extra is named with the way
    to get it.
    """
    try:
        yield
    except ImportError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0], "engine")
        raise MisuseError(
            f"this command needs packages that are missing ({error}): pip install "
            f"'zipage-lab[{extra}]'"
        ) from error
    except EngineError as error:
        raise MisuseError(str(error)) from error


def engine_settings(
    model: str,
    policy: str,
    *,
    kv_blocks: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_batched_tokens: int | None = None,
    max_running: int | None = None,
    max_model_len: int | None = None,
    host_blocks: int | None = None,
    memory_share: float | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Fields of the engine's settings; what is None is left to the engine. Raises MisuseError."""
    if memory_share is not None:
        if not 0 < memory_share <= 1:
            raise MisuseError(
                f"--memory-utilisation must be above 0 and at most 1, not {memory_share:g}"
            )
        if kv_blocks is not None:
            raise MisuseError(
                "--memory-utilisation decides how many blocks fit: it does not go with --kv-blocks"
            )
    given = {
        "model": model,
        "policy": policy,
        "num_blocks": kv_blocks,
        "block_size": block_size,
        "max_batched_tokens": max_batched_tokens,
        "max_running": max_running,
        "max_model_len": max_model_len,
        "host_blocks": host_blocks,
        "memory_share": memory_share,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    return {name: value for name, value in given.items() if value is not None}


RegistryPath = Annotated[
    Path,
    typer.Option("--registry", dir_okay=False, envvar="ZLAB_REGISTRY", help="The registry's file."),
]
DEFAULT_REGISTRY = Path(DEFAULT)
Who = Annotated[
    str | None, typer.Option("--who", show_default="the user's name", help="Who does it.")
]
Why = Annotated[str, typer.Option("--why", help="The reason, for the history.")]
LiveUrl = Annotated[
    str | None,
    typer.Option(
        "--live",
        metavar="URL",
        help="Also tell the server that runs there, as http://127.0.0.1:8000.",
    ),
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
        """The server to tell, if one is to be told. Raises MisuseError on an address or key that
        cannot be.
        """
        if self.live is None:
            if self.admin_key_file is not None:
                raise MisuseError(
                    f"--admin-key-file {self.admin_key_file} is for the server of --live, and "
                    f"none is named"
                )
            return None
        return open_server(self.live, self.admin_key_file)

    def check_reason(self, force: bool) -> None:
        """Raise MisuseError on force without a reason."""
        if force and not self.why.strip():
            raise MisuseError("--force needs --why: the reason is kept in the history")


def registry_at(path: Path, create: bool = False) -> PolicyRegistry:
    """The registry of a file. Raises MisuseError where it is not there and not to be made,
    RegistryError on another.
    """
    if not create and not path.exists():
        raise MisuseError(f"no registry at {path}: `zlab validate ... --registry {path}` makes one")
    if not path.parent.is_dir():
        raise MisuseError(f"--registry {path}: there is no folder {path.parent}")
    return PolicyRegistry(path, create)


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
    """Where it is about. Raises SimError, with the nearest known one, on a model or card that
    nobody knows.
    """
    return Target(find_model(model).name, find_gpu(gpu).name)


class ParallelBackend(StrEnum):
    """Joblib's name of where the work goes."""

    loky = "loky"
    dask = "dask"
    ray = "ray"


NEEDS = {ParallelBackend.dask: "distributed", ParallelBackend.ray: "ray"}

Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        show_default="one for each core or worker",
        help="Simulations at a time.",
    ),
]
BackendName = Annotated[
    ParallelBackend,
    typer.Option(
        "--backend",
        help="loky: processes here; dask, ray: a cluster (their package must be there).",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ADDRESS",
        help="The cluster's address: tcp://host:8786 (Dask), auto (Ray).",
    ),
]


@dataclass(frozen=True)
class SpreadOptions:
    """Over how many workers the runs are spread, and where those are."""

    jobs: Jobs = None
    backend: BackendName = ParallelBackend.loky
    cluster: Cluster = None

    @property
    def in_this_process(self) -> bool:
        """Whether one run after the other goes on here."""
        return self.jobs == 1 and self.backend is ParallelBackend.loky


@contextmanager
def spread(backend: ParallelBackend, jobs: int | None, cluster: str | None) -> Iterator[None]:
    """Within it `zlab.sim.sweep` uses that backend. Raises MisuseError when it cannot be
    reached.
    """
    options: dict[str, str] = {}
    if backend is ParallelBackend.loky:
        if cluster is not None:
            raise MisuseError(f"--cluster {cluster} needs --backend dask or ray")
        jobs = jobs or os.cpu_count() or 1
    else:
        _require(backend)
        if backend is ParallelBackend.ray:
            resolve_name("ray:init")(address=cluster, ignore_reinit_error=True)
            resolve_name("ray.util.joblib:register_ray")()
        elif cluster is None:
            raise MisuseError(
                "--backend dask needs --cluster ADDRESS, its scheduler's, as tcp://host:8786"
            )
        else:
            options["scheduler_host"] = cluster
    try:
        config = parallel_config(backend=str(backend), n_jobs=jobs or -1, **options)
    except (OSError, ValueError) as error:
        raise MisuseError(f"--backend {backend} --cluster {cluster}: {error}") from error
    with config:
        yield


def _require(backend: ParallelBackend) -> None:
    try:
        resolve_name(NEEDS[backend])
    except ModuleNotFoundError as error:
        raise MisuseError(
            f"--backend {backend} needs the package {NEEDS[backend]}: pip install {NEEDS[backend]}"
        ) from error
