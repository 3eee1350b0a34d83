"""`zlab compare`: several policies on the same workloads, one table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.compare import Compared, Estimate, recording_folders
from sim.compare import compare as run_compare
from sim.scenario import DEFAULT_BLOCK_SIZE, Scenario
from zlab.cluster import Backend, BackendName, Cluster, Jobs, spread
from zlab.compare_table import show_comparison
from zlab.options import (
    AsJson,
    BlockSize,
    Cost,
    Format,
    GpuName,
    HostBlocks,
    KvBlocks,
    LengthMultiplier,
    MaxBatchedTokens,
    MaxModelLen,
    MaxRunning,
    MemoryUtilisation,
    ModelName,
    PolicyNames,
    Seeds,
    SkipBadRows,
    Trace,
)
from zlab.outcome import MisuseError
from zlab.progress import Bar
from zlab.replay import check_new
from zlab.source import PREFIX, Source

INTERVALS = ("95 %, latencies only: bootstrap over the requests", "95 %: Student's t over the workloads")


def compare(
    trace: Trace,
    policy: PolicyNames,
    seeds: Seeds = 1,
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    kv_blocks: KvBlocks = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    max_batched_tokens: MaxBatchedTokens = None,
    max_running: MaxRunning = None,
    max_model_len: MaxModelLen = None,
    host_blocks: HostBlocks = None,
    memory_utilisation: MemoryUtilisation = None,
    length_multiplier: LengthMultiplier = 1.0,
    cost: Cost = None,
    format: Format = None,
    skip_bad_rows: SkipBadRows = False,
    jobs: Jobs = None,
    backend: BackendName = Backend.loky,
    cluster: Cluster = None,
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
    base = Scenario(
        gpu=gpu,
        model=model,
        kv_blocks=kv_blocks,
        block_size=block_size,
        max_batched_tokens=max_batched_tokens,
        max_running=max_running,
        max_model_len=max_model_len,
        host_blocks=host_blocks,
        memory_utilisation=memory_utilisation,
        length_multiplier=length_multiplier,
        cost=cost,
    )
    check_new(out)
    source = Source(trace, format, skip_bad_rows)
    if not source.is_synthetic and seeds > 1:
        raise MisuseError(
            f"{trace} is one fixed workload: --seeds {seeds} needs a made-up one ({PREFIX}...); without it latencies "
            "get their intervals from the trace's own requests"
        )
    first = source.seed if source.is_synthetic else 0
    numbers = list(range(first, first + seeds)) if source.is_synthetic else [None]
    workloads = [source.read(seed, as_json) for seed in numbers]
    total = len(policy) * len(workloads)
    with spread(backend, jobs, cluster), Bar("compare", total, "runs", as_json) as bar:
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
