"""Weights of the own decoder: allocated once where they will run, filled tensor by tensor, never held twice."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig, read_json
from engine.errors import ModelError
from engine.layers import LayerWeights
from engine.model import DecoderWeights
from engine.parallel import Parallel, part_of

INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # old checkpoints carry what follows from the configuration
INITIAL_DEVIATION = 0.02  # of random weights; the `initializer_range` of these families


@dataclass(frozen=True)
class Placement:
    """Where a named tensor of a checkpoint goes: into `target`, from row or column `start` of axis `axis` on.

    Rows of `target` beyond the tensor's end are padding. `adds_bias` marks what a sum over processes must add once.
    """

    target: torch.Tensor
    whole: tuple[int, ...]
    axis: int = 0
    start: int = 0
    adds_bias: bool = False


# Reads one tensor's part: from index `start` to `end` of `axis`.
Reader = Callable[[int, int, int], torch.Tensor]
NamedReader = tuple[str, tuple[int, ...], Reader]


def allocate(config: ModelConfig, parallel: Parallel, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Uninitialised weights of this process's part."""
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


def placements(config: ModelConfig, weights: DecoderWeights, parallel: Parallel) -> dict[str, Placement]:
    """Name in a Hugging Face checkpoint -> where its part goes, for every tensor that the model needs."""
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


def _layer_placements(config: ModelConfig, layer: LayerWeights, parallel: Parallel) -> dict[str, Placement]:
    part, rank = part_of(config, parallel), parallel.rank
    hidden, inner = config.hidden_size, part.intermediate_size
    found = {
        "input_layernorm.weight": _whole(layer.attention_norm),
        "post_attention_layernorm.weight": _whole(layer.feed_forward_norm),
        "self_attn.o_proj.weight": Placement(layer.output, (hidden, config.query_width), 1, rank * part.query_width),
        "mlp.down_proj.weight": Placement(layer.down, (hidden, config.intermediate_size), 1, rank * inner),
    }
    first_key = parallel.first_kv_head(config.num_kv_heads) * config.head_dim
    merged = (
        ("self_attn.q_proj", layer.qkv, layer.qkv_bias, config.query_width, 0, rank * part.query_width),
        ("self_attn.k_proj", layer.qkv, layer.qkv_bias, config.kv_width, part.query_width, first_key),
        ("self_attn.v_proj", layer.qkv, layer.qkv_bias, config.kv_width, part.query_width + part.kv_width, first_key),
        ("mlp.gate_proj", layer.gate_up, layer.gate_up_bias, config.intermediate_size, 0, rank * inner),
        ("mlp.up_proj", layer.gate_up, layer.gate_up_bias, config.intermediate_size, inner, rank * inner),
    )
    rows_of = {"q": part.query_width, "k": part.kv_width, "v": part.kv_width, "g": inner, "u": inner}
    for name, matrix, bias, whole_rows, at, start in merged:
        num_rows = rows_of[name.rsplit(".", 1)[-1][0]]
        found[f"{name}.weight"] = Placement(matrix[at : at + num_rows], (whole_rows, hidden), 0, start)
        if bias is not None:
            found[f"{name}.bias"] = Placement(bias[at : at + num_rows], (whole_rows,), 0, start)
    for name, tensor in (("self_attn.q_norm", layer.query_norm), ("self_attn.k_norm", layer.key_norm)):
        if tensor is not None:
            found[f"{name}.weight"] = _whole(tensor)
    for name, tensor in (("self_attn.o_proj", layer.output_bias), ("mlp.down_proj", layer.down_bias)):
        if tensor is not None:
            found[f"{name}.bias"] = Placement(tensor, (hidden,), adds_bias=True)
    return found


def _whole(target: torch.Tensor) -> Placement:
    return Placement(target, tuple(target.shape))


def fill(
    config: ModelConfig, weights: DecoderWeights, parallel: Parallel, tensors: Iterator[NamedReader], *, source: str
) -> None:
    """Read every tensor's part into its place; converts to the weights' dtype on the way.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape; `source` stands in the message.
    """
    waiting = placements(config, weights, parallel)
    for name, shape, read in tensors:
        if IGNORED.search(name) or (name == "lm_head.weight" and config.tied_embeddings):
            continue
        placement = waiting.pop(name, None)
        if placement is None:
            raise ModelError(f"{source}: tensor {name!r} has no place in a {config.family} decoder, or came twice")
        if shape != placement.whole:
            raise ModelError(f"{source}: tensor {name!r} has shape {list(shape)}, expected {list(placement.whole)}")
        _place(placement, read, parallel)
    if waiting:
        names = sorted(waiting)
        raise ModelError(f"{source}: {len(names)} tensors are missing, the first are {', '.join(names[:3])}")


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
    """Normal values of deviation 0.02 in every matrix, ones in the norms, zeros in the biases."""
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
        for ones in (layer.attention_norm, layer.feed_forward_norm, layer.query_norm, layer.key_norm):
            if ones is not None:
                ones.fill_(1.0)
        for zeros in (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias):
            if zeros is not None:
                zeros.zero_()


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, by its index where it has one.

    Raises:
        ModelError: none there; pickled weights are named and refused, because unpickling runs what the file says.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted({str(name) for name in _weight_map(index).values()})
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing"
            )
        return [folder / name for name in names]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        raise ModelError(
            f"{folder} has only pickled weights ({', '.join(pickled)}); they can run code when opened and are refused: "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder} has no *.safetensors file")


def _weight_map(index: Path) -> Mapping[str, object]:
    content = read_json(index).get("weight_map")
    if not isinstance(content, dict):
        raise ModelError(f"{index} has no weight_map")
    return content


def read_safetensors(files: list[Path]) -> Iterator[NamedReader]:
    """Every tensor of the files: name, shape and a reader of a part of it, from the mapped file."""
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
