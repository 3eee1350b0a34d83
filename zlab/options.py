"""Options that several commands share, those that belong together in groups (`zlab.option_groups`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sim.hardware import GPUS, MODELS
from sim.scenario import DEFAULTS, Scenario
from traces.formats.detect import FORMATS
from zlab.source import KINDS, PREFIX, Source

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
    typer.Option("--kv-blocks", min=1, show_default="as many as fit", help="Blocks in the pool."),
]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")]
MaxBatchedTokens = Annotated[
    int | None, typer.Option("--max-batched-tokens", min=1, show_default="8192", help="Most tokens of one step.")
]
MaxRunning = Annotated[
    int | None, typer.Option("--max-running", min=1, show_default="256", help="Most running requests.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", min=1, show_default="the model's limit", help="Most tokens of a request, prompt and output."
    ),
]
HostBlocks = Annotated[
    int | None,
    typer.Option("--host-blocks", min=0, show_default="0", help="Blocks of host memory for swapped requests."),
]
MemoryUtilisation = Annotated[
    float | None,
    typer.Option(
        "--memory-utilisation", show_default="0.9", help="Share of the card's memory to use, without --kv-blocks."
    ),
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
RunFolder = Annotated[
    Path | None, typer.Option("--out", file_okay=False, help="New folder for the recording of the run.")
]
PerfettoFile = Annotated[
    Path | None,
    typer.Option("--perfetto", dir_okay=False, help="Write a Chrome trace for ui.perfetto.dev, a .json file."),
]
Seeds = Annotated[
    int,
    typer.Option("--seeds", min=1, help=f"Workloads to make up, one a seed, counting from the spec's; {PREFIX} only."),
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
    cost: Cost = DEFAULTS.cost

    def scenario(self, policy: str = DEFAULTS.policy) -> Scenario:
        """With a policy."""
        return Scenario(
            policy=policy,
            gpu=self.gpu,
            model=self.model,
            memory_utilisation=self.memory_utilisation,
            length_multiplier=self.length_multiplier,
            cost=self.cost,
            **asdict(self.sizes),
        )


@dataclass(frozen=True)
class ReadingOptions:
    """How a trace is read."""

    format: Format = None
    skip_bad_rows: SkipBadRows = False

    def source(self, trace: str) -> Source:
        """A trace, or a made-up workload, to be read so."""
        return Source(trace, self.format, self.skip_bad_rows)
