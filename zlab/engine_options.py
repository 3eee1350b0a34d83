"""What the commands that run a real model share: options, how they become settings, how the engine's errors end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from engine.errors import EngineError
from sim.scenario import DEFAULT_BLOCK_SIZE
from zlab.outcome import MisuseError

EXTRAS = {  # by what is missing; all else that these commands need comes with [engine]
    "fastapi": "server", "starlette": "server", "uvicorn": "server", "prometheus_client": "server", "ray": "replicas",
}  # fmt: skip
DEFAULT_MODEL = "smollm2"

EngineModel = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="smollm2, a Hugging Face folder, a .gguf file, or random weights: dummy:NAME (dummy:tiny, dummy:qwen3-8b) "
        "or dummy:CONFIG.json.",
    ),
]
Device = Annotated[str | None, typer.Option("--device", show_default="cuda where there is one", help="cpu or cuda.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", show_default="bfloat16 on cuda, else float32", help="float32, bfloat16 or float16."),
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
    """While entered, what the engine refuses is misuse, and a missing extra is named with the way to get it."""
    try:
        yield
    except ImportError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0], "engine")
        raise MisuseError(
            f"this command needs packages that are missing ({error}): pip install 'zipage-lab[{extra}]'"
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
            raise MisuseError(f"--memory-utilisation must be above 0 and at most 1, not {memory_share:g}")
        if kv_blocks is not None:
            raise MisuseError("--memory-utilisation decides how many blocks fit: it does not go with --kv-blocks")
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
