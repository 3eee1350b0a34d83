"""Options that several commands share, and the scenario they make."""

from typing import Annotated

import typer

from sim.hardware import GPUS, MODELS
from traces.formats.detect import FORMATS
from zlab.source import KINDS, PREFIX

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace file in any known format (.gz too), or a made-up workload: "
        f"{PREFIX}KIND?key=value&..., as {PREFIX}amc23?samples=4&seed=1 (kinds: {', '.join(KINDS)}).",
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        help="A preset, FILE.toml, or FILE.py:Class; vary it with :key=value,... (see `zlab policy list`).",
    ),
]
PolicyNames = Annotated[
    list[str],
    typer.Option(
        "--policy", "-p", help="A policy as in `zlab replay`; repeat it, the first is what others are set against."
    ),
]
GpuName = Annotated[str, typer.Option("--gpu", help=f"A card: {', '.join(GPUS)}.")]
ModelName = Annotated[
    str, typer.Option("--model", help=f"{', '.join(MODELS)}, or the path of a Hugging Face config.json.")
]
KvBlocks = Annotated[
    int | None,
    typer.Option("--kv-blocks", min=1, help="Blocks in the pool; as many as fit on the card if not given."),
]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")]
MaxBatchedTokens = Annotated[
    int | None, typer.Option("--max-batched-tokens", min=1, help="Most tokens of one step; 8192.")
]
MaxRunning = Annotated[int | None, typer.Option("--max-running", min=1, help="Most running requests; 256.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", min=1, help="Most tokens of a request, prompt and output; the model's limit."),
]
HostBlocks = Annotated[
    int | None, typer.Option("--host-blocks", min=0, help="Blocks of host memory for swapped requests; 0.")
]
MemoryUtilisation = Annotated[
    float | None,
    typer.Option("--memory-utilisation", help="Share of the card's memory to use where it gives the blocks; 0.9."),
]
LengthMultiplier = Annotated[
    float,
    typer.Option("--length-multiplier", help="Outputs longer by this factor where the request gets compressed."),
]
Cost = Annotated[
    str | None,
    typer.Option(
        "--cost",
        "--profile",
        metavar="PROFILE",
        help="Measured costs instead of the card's roofline: a name in sim/profiles, or FILE.json (docs/COST.md).",
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help=f"The trace's format, if not by its columns: {', '.join(FORMATS)}.")
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave bad rows of the trace out and count them by reason.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Processes to use; -1 is one for each core.")]
Seeds = Annotated[
    int,
    typer.Option("--seeds", min=1, help=f"Workloads to make up, one a seed, counting from the spec's; {PREFIX} only."),
]
