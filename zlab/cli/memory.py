"""`zlab memory`: where a card's memory goes, and how many KV blocks are left."""

import json
import math
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zlab.policies.core.plan import SchedulerLimits
from zlab.sim.memory import MemoryPlan, MemorySettings, plan_memory
from zlab.sim.specs import GIB, SimError, find_gpu, find_model

LIMITS = SchedulerLimits(num_blocks=1)  # what a step is bounded by where nothing else is said
DEFAULTS = MemorySettings()
DEFAULT_BUDGET_BLOCKS = 9  # with blocks of 256, 2,048 tokens kept and room for the next 256


def memory(
    gpu: Annotated[
        str, typer.Option(help="A card by name: h200, h100, a100-80, a100-40, l40s, rtx4090.")
    ] = "h200",
    model: Annotated[
        str, typer.Option(help="A model by name, or the path of a Hugging Face config.json.")
    ] = "qwen3-8b",
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 256,
    utilisation: Annotated[
        float, typer.Option(help="Share of the card's memory the engine may use.")
    ] = 0.9,
    max_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens of one step.")
    ] = LIMITS.max_batched_tokens,
    max_running: Annotated[
        int, typer.Option(help="Most requests of one step.")
    ] = LIMITS.max_running,
    max_model_len: Annotated[
        int | None, typer.Option(show_default="the model's limit", help="Longest request.")
    ] = None,
    reserve_gib: Annotated[
        float, typer.Option(help="GiB for the driver's context, libraries, CUDA graphs.")
    ] = DEFAULTS.reserve_bytes / GIB,
    host_blocks: Annotated[
        int, typer.Option(help="Blocks of host memory for swapped requests.")
    ] = 0,
    slots: Annotated[
        int, typer.Option(help="Query slots (M); 0 means that nothing is ever compressed.")
    ] = 0,
    budget_blocks: Annotated[
        int | None,
        typer.Option(
            show_default=str(DEFAULT_BUDGET_BLOCKS),
            help="Most blocks of a compressed request (N_max).",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(show_default="16", help="Queries kept per slot (w).")
    ] = None,
    concurrent_compressions: Annotated[
        int | None,
        typer.Option(
            show_default=str(DEFAULTS.concurrent_compressions),
            help="Compressions the workspace has room for.",
        ),
    ] = None,
    global_scores: Annotated[
        bool | None,
        typer.Option(show_default="it does", help="Whether the scorer keeps a history."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what takes a card's memory, term by term, and how many KV blocks fit.

    Steps are as large by default as those of `zlab replay` and of the engine, so `zlab replay` has
    as many blocks under a policy that compresses nothing.
    """
    if not math.isfinite(reserve_gib):
        raise typer.BadParameter(f"must be finite, got {reserve_gib}", param_hint="--reserve-gib")
    compression = {
        "budget_blocks": budget_blocks,
        "window": window,
        "concurrent_compressions": concurrent_compressions,
        "global_scores": global_scores,
    }
    given: dict[str, Any] = {key: value for key, value in compression.items() if value is not None}
    try:
        settings = MemorySettings(
            block_size=block_size,
            utilisation=utilisation,
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            reserve_bytes=int(reserve_gib * GIB),
            host_blocks=host_blocks,
        )
        if slots:
            settings = replace(
                settings, num_slots=slots, **({"budget_blocks": DEFAULT_BUDGET_BLOCKS} | given)
            )
        elif given:
            options = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            raise SimError(
                f"{options} says how requests are compressed, which needs query slots: give --slots"
            )
        plan = plan_memory(find_gpu(gpu), find_model(model), settings)
    except SimError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(plan.as_dict()))
    else:
        _show(plan)


def _show(plan: MemoryPlan) -> None:
    console = Console()
    table = Table(title=f"{plan.model} on {plan.gpu}")
    table.add_column("term")
    table.add_column("bytes", justify="right")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    for name, num_bytes in plan.terms.items():
        share = num_bytes / plan.memory_bytes
        table.add_row(
            name,
            f"{num_bytes:,}",
            f"{num_bytes / GIB:.2f}",
            f"{share:.1%}",
            end_section=name.startswith("un"),
        )
    table.add_row(
        "all of the card", f"{plan.memory_bytes:,}", f"{plan.memory_bytes / GIB:.2f}", "100.0%"
    )
    console.print(table)
    settings = plan.settings
    console.print(
        f"{plan.num_blocks:,} blocks of {settings.block_size} tokens = {plan.num_tokens:,} tokens, "
        f"{plan.block_bytes:,} bytes a block"
    )
    if settings.num_slots:
        needed = settings.num_slots * settings.budget_blocks
        verdict = (
            "fits"
            if needed <= plan.num_blocks
            else "DOES NOT FIT: a constrained policy will refuse to start"
        )
        product = f"{settings.num_slots} x {settings.budget_blocks} = {needed:,} blocks"
        console.print(f"all slots at their budget: {product} ({verdict})")
