"""Which card and which model: each one row of published numbers, from which sizes and work are derived."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sim.errors import SimError
from sim.model_config import read_model_config
from sim.model_shape import Model

__all__ = ["GPUS", "MODELS", "Gpu", "Model", "find_gpu", "find_model", "gpu_of_card", "model_from_config"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card: what its maker promises, before any efficiency factor."""

    name: str
    memory_bytes: int  # what the CUDA driver reports as total, a little less than the datasheet's figure
    memory_bandwidth_bytes_per_s: float
    bf16_flops: float  # dense, fp32 accumulation, multiply and add counted as two
    pcie_bytes_per_s: float  # host <-> device, one direction


# Bandwidth, dense bf16 rate and PCIe generation: NVIDIA's datasheets of each card (SXM for H200, H100, A100; where a
# sheet gives the rate with sparsity it is halved; PCIe x16 is 64 GB/s a direction for generation 5, 32 GB/s for 4).
# Memory: the total that torch prints for the card (`total capacity of ... GiB`); driver versions move it by 0.1 GiB.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", int(139.80 * GIB), 4.8e12, 989.5e12, 64e9),
        Gpu("h100", int(79.10 * GIB), 3.35e12, 989.5e12, 64e9),
        Gpu("a100-80", int(79.15 * GIB), 2.039e12, 312e12, 32e9),
        Gpu("a100-40", int(39.39 * GIB), 1.555e12, 312e12, 32e9),
        Gpu("l40s", int(44.39 * GIB), 0.864e12, 362e12, 32e9),
        Gpu("rtx4090", int(23.64 * GIB), 1.008e12, 165.2e12, 32e9),
    )
}

# How the driver's name of a card is told apart.
CARDS: Mapping[str, str] = {
    "h200": r"\bh200\b",
    "h100": r"\bh100\b",
    "a100-80": r"\ba100\b.*\b80gb",
    "a100-40": r"\ba100\b.*\b40gb",
    "l40s": r"\bl40s\b",
    "rtx4090": r"\brtx 4090$",
}

# Values of each model's public config.json on the Hugging Face hub.
MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151_936, True, 40_960, qk_norm=True),
        Model("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151_936, True, 40_960, qk_norm=True),
        Model("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151_936, True, 40_960, qk_norm=True),
        Model("qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False, 40_960, qk_norm=True),
        Model("qwen3-14b", 40, 5120, 17_408, 40, 8, 128, 151_936, False, 40_960, qk_norm=True),
        Model("qwen3-32b", 64, 5120, 25_600, 64, 8, 128, 151_936, False, 40_960, qk_norm=True),
        Model("deepseek-r1-distill-llama-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072),
        Model("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49_152, True, 8192),
    )
}
ALIASES = {"smollm2": "smollm2-135m"}  # the engine's name of the model that a package brings along


def find_gpu(name: str) -> Gpu:
    """The row of that name, upper or lower case.

    Raises:
        SimError: no such card; the message names the nearest and all of them.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise SimError(_unknown("GPU", name, tuple(GPUS)))
    return gpu


def gpu_of_card(card: str) -> str:
    """The row of `GPUS` for what a driver calls the card ("NVIDIA H200"); for others that name, fit for a file."""
    for name, pattern in CARDS.items():
        if re.search(pattern, card.lower()):
            return name
    return re.sub(r"[^a-z0-9.]+", "-", card.lower().removeprefix("nvidia ")).strip("-") or "unknown"


def find_model(name: str) -> Model:
    """The row of that name (case and a hub organisation before `/` ignored; aliases), or the model of a config.json.

    `name` is taken as a path when it ends in `.json` or is an existing directory.

    Raises:
        SimError: neither a row nor a readable configuration; the message names the nearest row and all of them.
    """
    short = name.lower().rsplit("/", 1)[-1]
    model = MODELS.get(ALIASES.get(short, short))
    if model is not None:
        return model
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return model_from_config(path)
    choices = (*MODELS, "or the path of a Hugging Face config.json")
    raise SimError(_unknown("model", name.rsplit("/", 1)[-1], choices))


def model_from_config(path: Path | str) -> Model:
    """The model that a Hugging Face `config.json` (or the folder that holds one) describes.

    Raises:
        SimError: unreadable, an architecture other than dense Llama, Mistral, Qwen2 or Qwen3, or a missing key.
    """
    return read_model_config(Path(path))


def _unknown(kind: str, name: str, choices: tuple[str, ...]) -> str:
    longer = [choice for choice in choices if name and choice.startswith(name.lower())]
    near = longer or difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}:{hint} choices: {', '.join(choices)}"
