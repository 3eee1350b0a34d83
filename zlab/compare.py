"""`zlab compare`: several policies on the same workloads, one table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.compare import Compared, Estimate, recording_folders
from sim.compare import compare as run_compare
from zlab.cluster import SpreadOptions, spread
from zlab.compare_table import show_comparison
from zlab.option_groups import with_groups
from zlab.options import AsJson, PolicyNames, ReadingOptions, ScenarioOptions, Seeds, Trace
from zlab.outcome import MisuseError
from zlab.progress import Bar
from zlab.replay import check_new
from zlab.source import PREFIX


@with_groups
def compare(
    trace: Trace,
    *,
    policy: PolicyNames,
    seeds: Seeds = 1,
    given: ScenarioOptions,
    reading: ReadingOptions,
    spreading: SpreadOptions,
    out: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="New folder for one recording a policy (and seed).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay the same workload under several policies and set them against the first.

    With --seeds N (a synth: workload) N workloads are made; figures are means over them with 95 % intervals (Student's
    t), ratios are taken within each workload. With one workload only latencies have an interval, from drawing its
    requests anew: it tells what single requests do to a percentile, not what another day would bring.
    """
    base = given.scenario()
    check_new(out)
    source = reading.source(trace)
    if not source.is_synthetic and seeds > 1:
        raise MisuseError(
            f"{trace} is one fixed workload: --seeds {seeds} needs a made-up one ({PREFIX}...); without it latencies "
            "get their intervals from the trace's own requests"
        )
    first = source.seed if source.is_synthetic else 0
    numbers = list(range(first, first + seeds)) if source.is_synthetic else [None]
    workloads = [source.read(seed, as_json) for seed in numbers]
    total = len(policy) * len(workloads)
    with spread(spreading.backend, spreading.jobs, spreading.cluster), Bar("compare", total, "runs", as_json) as bar:
        compared = run_compare(workloads, policy, base, out, bar)
    if as_json:
        typer.echo(json.dumps(_as_dict(trace, numbers, compared)))
        return
    show_comparison(compared, workloads[0], len(workloads))
    if out is not None:
        for row, folders in zip(compared, recording_folders(policy, len(workloads), out), strict=True):
            typer.echo(f"{row.policy}: {', '.join(str(folder) for folder in folders)}")


def _as_dict(trace: str, seeds: Sequence[int | None], compared: Sequence[Compared]) -> dict[str, Any]:
    return {
        "trace": trace,
        "seeds": [seed for seed in seeds if seed is not None],
        "interval": "95 % Student t over workloads"
        if len(seeds) > 1
        else "95 % bootstrap over requests (latencies only)",
        "policies": [
            {
                "policy": row.policy,
                "runs": [dict(summary) for summary in row.summaries],
                "figures": {name: _interval(estimate) for name, estimate in row.figures.items()},
                "ratios": {name: _interval(estimate) for name, estimate in row.ratios.items()},
            }
            for row in compared
        ],
    }


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
