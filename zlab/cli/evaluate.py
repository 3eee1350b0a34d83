"""`zlab evaluate`: how many problems a model solves under policies and budgets, or a server."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from zlab.cli.console import (
    INTERRUPTED,
    MISSING,
    WENT_WRONG,
    Bar,
    MisuseError,
    console,
    count,
    fail,
    figure,
    plain_table,
    share,
)
from zlab.cli.options import (
    DEFAULT_MODEL,
    AsJson,
    Device,
    Dtype,
    EngineModel,
    MemoryShare,
    Seed,
    SizeOptions,
    engine_room,
    engine_settings,
    with_groups,
)
from zlab.policies.scorers import SCORERS
from zlab.policies.spec import load_policy, with_setting
from zlab.sim.length_profile import make_length_profiles
from zlab.sim.simulator import AtBoundary

ALL = "all"
PLOT = "accuracy.html"
LABORATORY = "laboratory.json"
PROFILE = "length-profile"
KEY = "ZLAB_SERVER_KEY"
TASK_CAP = 1.25  # of the longest trace: an output of a synthetic task may be so much longer
FILE_CAP = 2048

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        "-d",
        help="JSON Lines of prompt (or messages) and answer, or synthetic problems: "
        "task:NAME[,NAME]?count=100&level=3&seed=1 (chain, bfs, machine, circuit, all). "
        "Repeat it for several.",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help="A policy as in `zlab replay`; repeat it."),
]
Baseline = Annotated[
    str, typer.Option("--baseline", help="The policy that the others are compared with.")
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        help="Kept tokens (512), or a share of the baseline's mean output (1/4, 25%), for every "
        "policy that has such a budget; several with commas, or repeat it.",
    ),
]
Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer",
        help=f"Evaluate each compressing policy with this scorer; {ALL}, or several with commas, "
        "or repeat it.",
    ),
]
Check = Annotated[
    str | None,
    typer.Option(
        "--check",
        show_default="exact",
        help="How outputs of files are checked: exact, number, choice, math-verify, or "
        "FILE.py:FUNCTION of (output, row).",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="The most problems of each source.")
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        min=0.0,
        show_default="0",
        help="0 takes the most probable token; repeat it for columns of both kinds.",
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", min=1, help="Outputs a problem where tokens are drawn.")
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Draw from the most probable tokens of this share.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        show_default=f"{TASK_CAP:g} x the longest trace of a task, {FILE_CAP} of a file",
        help="The most tokens of an output.",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Send prompts through the model's chat template.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="Evaluate a server that speaks OpenAI's API and not the own engine; repeat it, the "
        f"first is the baseline. ${KEY} is sent as its key.",
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option("--served-model", help="As the servers name it.", show_default="their first"),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, help="Requests to a server at once.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Seconds for an output of a server.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        file_okay=False,
        show_default="runs/evaluation-...",
        help="Folder of journal and results; an interrupted run goes on there.",
    ),
]


TeacherForced = Annotated[
    bool,
    typer.Option(
        "--teacher-forced",
        help="Feed known traces (synthetic tasks, or rows with a trace) in place of generating, "
        "and count those with every token right: seconds a policy. The oracle, which knows the "
        "attention of all later tokens, stands beside them.",
    ),
]


@dataclass(frozen=True)
class ColumnOptions:
    """What is compared."""

    policy: Policies = None
    baseline: Baseline = "full-kv"
    budget: Budgets = None
    scorer: Scorers = None


@dataclass(frozen=True)
class OutputOptions:
    """Which problems, and how their outputs are drawn and checked."""

    check: Check = None
    limit: Limit = None
    temperature: Temperatures = None
    samples: Samples = 1
    top_p: TopP = 1.0
    seed: Seed = 0
    max_tokens: MaxTokens = None
    chat: Chat = False


@dataclass(frozen=True)
class ModelOptions:
    """The own engine."""

    model: EngineModel = DEFAULT_MODEL
    sizes: SizeOptions = field(default_factory=SizeOptions)
    memory_utilisation: MemoryShare = None
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class ServerOptions:
    """Servers in its place."""

    engine: Engines = None
    served_model: ServedModel = None
    concurrency: Concurrency = 32
    timeout: Timeout = 600.0


@with_groups
def evaluate(
    *,
    data: Data,
    columns: ColumnOptions,
    outputs: OutputOptions,
    own: ModelOptions,
    remote: ServerOptions,
    teacher_forced: TeacherForced = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Solve problems under several policies and budgets, and say how many answers stay right.

    Pass@1 has Wilson's 95 % interval; differences to the baseline are taken on the same problems
    (McNemar's test). Outputs are kept as they come: the same command goes on after Ctrl-C. Exit
    code 0: evaluated; 1: a request or a checker failed (all complete outputs are kept); 2: misuse;
    130: interrupted.
    """
    if teacher_forced:
        _in_laboratory(data, columns, outputs, own, remote, out, as_json)
        return
    with engine_room():
        results, folder = _evaluate(data, columns, outputs, own, remote, out, as_json)
    profiles = _write_profiles(results, folder) if not remote.engine else []
    if as_json:
        typer.echo(json.dumps(results))
        return
    show_results(results)
    typer.echo(f"\nresults in {folder}")
    for path in profiles:
        typer.echo(f"lengths in {path} (--length-profile of replay, compare, validate, demo)")
    _plot(results, folder)


def _evaluate(
    specs: Sequence[str],
    columns: ColumnOptions,
    outputs: OutputOptions,
    own: ModelOptions,
    remote: ServerOptions,
    out: Path | None,
    silent: bool,
) -> tuple[dict[str, Any], Path]:
    """Run the evaluation; on Ctrl-C say how far it came and leave with code 130."""
    from zlab.engine.evaluation.dataset import CheckerError, read_datasets
    from zlab.engine.evaluation.runner import Evaluation, RunError

    data = read_datasets(specs, outputs.check, outputs.limit)
    servers = tuple(remote.engine or ())
    _check_servers(columns, own, remote)
    cap = outputs.max_tokens or _default_cap(data)
    plan = _plan(columns, outputs, own, servers, cap)
    interrupt = AtBoundary()
    backend = (
        _servers(remote, plan, outputs.chat)
        if servers
        else _own_engine(own, plan, outputs.chat, interrupt)
    )
    evaluation = Evaluation(plan, data, backend, out)
    done = 0
    with Bar("evaluate", evaluation.num_outputs, "outputs", silent) as bar:

        def watch(num_done: int, name: str) -> None:
            nonlocal done
            done = num_done
            bar(num_done, name)

        evaluation.progress = watch
        try:
            if servers:  # requests are under way in other threads: Ctrl-C ends the wait for them
                return evaluation.run(), evaluation.folder
            with interrupt:
                return evaluation.run(), evaluation.folder
        except KeyboardInterrupt as error:
            typer.echo(
                f"interrupted after {done:,} of {evaluation.num_outputs:,} outputs; the same "
                f"command goes on in {evaluation.folder}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from error
        except (CheckerError, RunError) as error:
            raise fail(str(error), WENT_WRONG) from error


def _plan(
    columns: ColumnOptions,
    outputs: OutputOptions,
    own: ModelOptions,
    servers: tuple[str, ...],
    max_tokens: int,
) -> Any:
    from zlab.engine.evaluation.runner import KeptTokens, Plan

    return Plan(
        baseline=columns.baseline,
        policies=tuple(_with_scorers(columns.policy or [], _listed(columns.scorer))),
        budgets=tuple(KeptTokens.parse(one) for one in _listed(columns.budget)),
        temperatures=tuple(outputs.temperature or (0.0,)),
        samples=outputs.samples,
        top_p=outputs.top_p,
        seed=outputs.seed,
        max_tokens=max_tokens,
        servers=servers,
        block_size=own.sizes.block_size,
    )


def _in_laboratory(
    specs: Sequence[str],
    columns: ColumnOptions,
    outputs: OutputOptions,
    own: ModelOptions,
    remote: ServerOptions,
    out: Path | None,
    as_json: bool,
) -> None:
    """Judge policies on known traces, and print and write what is found."""
    unused = replace(outputs, check=None, limit=None)
    if unused != OutputOptions() or remote != ServerOptions():
        raise MisuseError(
            "--teacher-forced feeds known traces: nothing is drawn, cut off or asked of a server"
        )
    sizes = replace(own.sizes, block_size=SizeOptions.block_size)
    if sizes != SizeOptions() or own.memory_utilisation is not None:
        raise MisuseError("--teacher-forced has no pool of blocks: only --block-size counts")
    if out is not None and (out / LABORATORY).exists():
        raise MisuseError(f"--out {out}: already holds {LABORATORY}")
    with engine_room():
        from zlab.engine.engine import EngineSettings, find_device, find_dtype
        from zlab.engine.evaluation.dataset import read_datasets
        from zlab.engine.evaluation.laboratory import run_laboratory
        from zlab.engine.model.loader import default_dtype, load_model

        data = read_datasets(specs, outputs.check, outputs.limit)
        plan = _plan(columns, outputs, own, (), 1)
        plan.check_budgets()
        settings = engine_settings(own.model, plan.baseline, device=own.device, dtype=own.dtype)
        device = find_device(settings.get("device", EngineSettings.device))
        dtype = find_dtype(settings.get("dtype")) or default_dtype(device)
        loaded = load_model(own.model, device=device, dtype=dtype)
        examples = [example for one in data for example in one.examples]
        with Bar("evaluate", silent=as_json) as bar:
            judged = run_laboratory(
                loaded,
                examples,
                plan,
                device=device,
                dtype=dtype,
                progress=lambda done, total, name: bar(100 * done // total, name),
            )
    results = {
        "format": "zlab-laboratory/1",
        "model": own.model,
        "block_size": plan.block_size,
        "data": [{"name": one.name, "source": one.source, "sha256": one.sha256} for one in data],
        "policies": [one.as_dict() for one in judged],
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / LABORATORY).write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    if as_json:
        typer.echo(json.dumps(results))
        return
    table = plain_table(
        "", "kept\ntokens", "traces\nall right", "95 %\ninterval", "wrong\ntokens", "s"
    )
    for one in results["policies"]:
        low, high = one["exact_interval"]
        table.add_row(
            escape(one["scorer"] or one["policy"]),
            count(one["budget_tokens"]),
            share(one["exact"]),
            f"{100 * low:.0f}-{100 * high:.0f}",
            f"{one['token_errors']:.2%}",
            figure(one["wall_s"]),
        )
    to = console()
    to.print(f"{escape(own.model)}: {len(examples):,} traces, fed a block at a time\n")
    to.print(table)
    if out is not None:
        typer.echo(f"\nresults in {out / LABORATORY}")


def _listed(given: Sequence[str] | None) -> list[str]:
    """Values of a repeated option, commas taken apart."""
    return [part.strip() for one in given or () for part in one.split(",") if part.strip()]


def _with_scorers(policies: Sequence[str], scorers: Sequence[str]) -> list[str]:
    """Every compressing policy with every scorer, the others as they are."""
    if not scorers:
        return list(policies)
    names = list(SCORERS) if ALL in scorers else scorers
    found, compresses = list[str](), False
    for spec in policies:
        if load_policy(spec).budget.floor(1) is None:
            found.append(spec)
            continue
        compresses = True
        found += [with_setting(spec, "compression.scorer", name) for name in names]
    if not compresses:
        raise MisuseError(f"--scorer {', '.join(scorers)} needs a --policy that compresses")
    return found


def _check_servers(columns: ColumnOptions, own: ModelOptions, remote: ServerOptions) -> None:
    """Raise MisuseError for options that go with the own engine, or with servers, alone."""
    if not remote.engine:
        if remote != ServerOptions():
            raise MisuseError("--served-model, --concurrency and --timeout are for --engine")
        return
    if own != ModelOptions():
        usual = vars(ModelOptions())
        changed = [name for name, value in vars(own).items() if value != usual[name]]
        raise MisuseError(
            f"{', '.join(changed)} of the own engine cannot be set for a server (--engine); its "
            "model is named by --served-model"
        )
    if columns != ColumnOptions():
        raise MisuseError(
            "policies, scorers and budgets are for the own engine; each --engine is one column"
        )
    for url in remote.engine:
        if not url.startswith(("http://", "https://")):
            raise MisuseError(f"--engine {url}: must begin with http:// or https://")


def _default_cap(data: Sequence[Any]) -> int:
    """The most output tokens where none are given: by the traces, if all problems have one."""
    traces = [example.trace for one in data for example in one.examples]
    if all(trace is not None for trace in traces):
        return int(TASK_CAP * max(len(trace.split()) for trace in traces))
    return FILE_CAP


def _own_engine(own: ModelOptions, plan: Any, chat: bool, interrupt: AtBoundary) -> Any:
    from zlab.engine.engine import EngineSettings
    from zlab.engine.evaluation.local import LocalBackend

    settings = engine_settings(
        own.model,
        plan.baseline,
        **asdict(own.sizes),
        memory_share=own.memory_utilisation,
        device=own.device,
        dtype=own.dtype,
        seed=plan.seed,
    )
    return LocalBackend(
        EngineSettings(**settings),
        max_tokens=plan.max_tokens,
        top_p=plan.top_p,
        chat=chat,
        on_step=interrupt.check,
    )


def _servers(remote: ServerOptions, plan: Any, chat: bool) -> Any:
    from zlab.engine.evaluation.remote import RemoteBackend

    return RemoteBackend(
        plan.servers,
        model=remote.served_model,
        max_tokens=plan.max_tokens,
        top_p=plan.top_p,
        chat=chat,
        concurrency=remote.concurrency,
        timeout_s=remote.timeout,
        key=os.environ.get(KEY),
    )


def show_results(results: Mapping[str, Any]) -> None:
    """Print the results as a table, and each source by itself where there are several."""
    to = console()
    sources = results["data"]
    listed = ", ".join(f"{one['problems']:,} of {one['name']} ({one['check']})" for one in sources)
    model = results["model"]
    served = model if isinstance(model, str) else ", ".join(sorted(set(model.values())))
    to.print(
        f"{escape(served)}: {escape(listed)}; outputs of at most {results['max_tokens']:,} tokens"
    )
    to.print()
    to.print(_table(results["columns"]))
    if len(sources) > 1:
        to.print()
        table = plain_table("pass@1 by source", "kept\ntokens", *(one["name"] for one in sources))
        for label, column in zip(_labels(results["columns"]), results["columns"], strict=True):
            table.add_row(
                escape(label),
                count(column["budget_tokens"]),
                *(share(column["data"][one["name"]]["pass_at_1"]) for one in sources),
            )
        to.print(table)


def _table(columns: Sequence[Mapping[str, Any]]) -> Any:
    table = plain_table(
        "", "kept\ntokens", "pass@1", "95 %\ninterval", "of base-\nline", "paired\np",
        "output\ntokens", "length", "at\ncap", "compres-\nsions", "tokens\n/s",
    )  # fmt: skip
    for label, column in zip(_labels(columns), columns, strict=True):
        low, high = column["pass_at_1_interval"]
        paired = column["of_baseline"]
        table.add_row(
            escape(label),
            count(column["budget_tokens"]),
            share(column["pass_at_1"]),
            f"{100 * low:.0f}-{100 * high:.0f}",
            share(paired["ratio"]) if paired else MISSING,
            f"{paired['p_value']:.3g}" if paired else MISSING,
            figure(column["mean_output_tokens"]),
            f"{paired['length_ratio']:.2f}x" if paired else MISSING,
            share(column["share_at_cap"]),
            figure(column["compressions_per_output"]),
            figure(column["tokens_per_s"]),
        )
    return table


def _write_profiles(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the length profile of every temperature, the first under the plain name."""
    written = []
    for place, (heat, profile) in enumerate(make_length_profiles(results).items()):
        path = folder / (f"{PROFILE}-{heat:g}.json" if place else f"{PROFILE}.json")
        path.write_text(json.dumps(profile, indent=2) + "\n", "utf-8")
        written.append(path)
    return written


def _labels(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Preset and scorer of each column, or its whole name where these are not unique."""

    def short(column: Mapping[str, Any]) -> str:
        label = column["server"] or column["policy"].partition(":")[0]
        label += f" {column['scorer']}" if column["scorer"] else ""
        return f"{label} @ {column['temperature']:g}" if column["temperature"] else label

    keys = [(short(one), one["budget_tokens"]) for one in columns]
    if len(set(keys)) < len(keys):
        return [one["name"] for one in columns]
    return [label for label, _ in keys]


def _plot(results: Mapping[str, Any], folder: Path) -> None:
    """Write the plot where the dashboard's packages are there, else say how to get it."""
    budgets = [one for one in results["columns"] if one["budget_tokens"] is not None]
    if not budgets:
        return
    if find_spec("plotly") is None or find_spec("pandas") is None:
        typer.echo("a plot needs pip install 'zipage-lab[report]'; then run the command again")
        return
    from zlab.dashboard.figures.quality import accuracy_figure

    accuracy_figure(results).write_html(folder / PLOT, include_plotlyjs=True)
    typer.echo(f"plot    in {folder / PLOT}")
