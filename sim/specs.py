"""Published numbers of GPUs and models, and the bytes and operations that follow from them.

`GPUS` and `MODELS` are rows of numbers; `ModelSpec` derives sizes and work from a model's shape.
`read_model_config` makes a `ModelSpec` from a Hugging Face `config.json` and refuses by name what
is not modelled. The engine reads its models' shapes from here, too (`zlab.engine.model.spec`), so
that simulator and engine agree on every size.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zlab.traces.choices import unknown_choice

GIB = 2**30


class SimError(ValueError):
    """The simulator cannot do what was asked. The message names the value and the choices."""


# GPUs


@dataclass(frozen=True, slots=True)
class Gpu:
    """The published numbers of one GPU, before any efficiency factor.

    Attributes:
        name: Name of the row.
        memory_bytes: Memory that the CUDA driver reports as total, a little less than the data
            sheet's figure.
        memory_bandwidth_bytes_per_s: Bandwidth of the memory.
        bf16_flops: Dense bf16 rate with fp32 accumulation; a multiply and an add count as two.
        pcie_bytes_per_s: Rate between host and device in one direction.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    bf16_flops: float
    pcie_bytes_per_s: float


# Bandwidth, dense bf16 rate and PCIe generation are from NVIDIA's data sheets (SXM for H200, H100
# and A100). Where a sheet gives the rate with sparsity, it is halved. PCIe x16 has 64 GB/s a
# direction in generation 5, 32 GB/s in generation 4. Memory is the total that torch prints for the
# GPU (`total capacity of ... GiB`); driver versions move it by 0.1 GiB.
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
# Patterns of the names by which a driver calls these GPUs.
_DRIVER_NAMES: Mapping[str, str] = {
    "h200": r"\bh200\b",
    "h100": r"\bh100\b",
    "a100-80": r"\ba100\b.*\b80gb",
    "a100-40": r"\ba100\b.*\b40gb",
    "l40s": r"\bl40s\b",
    "rtx4090": r"\brtx 4090$",
}
# The total of a driver may differ by this share from the row of the same GPU.
_SAME_MEMORY = 0.01


@dataclass(frozen=True, slots=True)
class VllmDefaults:
    """vLLM V1's default limits on a GPU.

    Attributes:
        batched_tokens: Tokens of a step with `LLM()`.
        server_batched_tokens: Tokens of a step in the server.
        max_running: Requests that may hold blocks (`max_num_seqs`).
    """

    batched_tokens: int
    server_batched_tokens: int
    max_running: int


def vllm_defaults(gpu: Gpu) -> VllmDefaults:
    """Return vLLM's defaults for the GPU, by its memory and, for the A100, by its name.

    Versions 0.25.0 and 0.33.0 agree on all GPUs of `GPUS`.
    """
    if gpu.memory_bytes < 70 * GIB or gpu.name.startswith("a100"):
        return VllmDefaults(8192, 2048, 256)
    return VllmDefaults(16_384, 8192, 1024)


def find_gpu(name: str) -> Gpu:
    """Return the row of that name. Case does not matter.

    Raises:
        SimError: There is no such row; the message names the nearest one and all of them.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise SimError(unknown_choice("GPU", name, GPUS))
    return gpu


def gpu_of_card(card: str) -> str:
    """Return the name of the row in `GPUS` for a driver's name of a GPU ("NVIDIA H200").

    For other GPUs, the result is the driver's name with the characters that a file name allows.
    """
    for name, pattern in _DRIVER_NAMES.items():
        if re.search(pattern, card.lower()):
            return name
    return re.sub(r"[^a-z0-9.]+", "-", card.lower().removeprefix("nvidia ")).strip("-") or "unknown"


def gpu_with_memory(card: str, memory_bytes: int) -> Gpu:
    """Return the GPU for a driver's name and total memory.

    It is the row of `GPUS` if name and memory agree, so that plans for it do not depend on the
    driver's version. For any other GPU only name and memory are known; its rates are NaN.
    """
    name = gpu_of_card(card)
    row = GPUS.get(name)
    if row is not None and abs(row.memory_bytes - memory_bytes) <= _SAME_MEMORY * memory_bytes:
        return row
    nan = float("nan")
    return Gpu(name, memory_bytes, nan, nan, nan)


# Models


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one dense Llama-like model, and the bytes and operations that follow from it.

    The model has grouped-query attention, a gated MLP, RMS norms and no position parameters. Keys
    and values are cached in the weights' dtype. A multiply and an add are two operations.

    Attributes:
        name: Name of the row, or of the configuration's folder.
        num_layers: Layers.
        hidden_size: Values of the residual stream.
        intermediate_size: Values between the MLP's projections.
        num_query_heads: Query heads of a layer.
        num_kv_heads: Key and value heads of a layer.
        head_dim: Values of one head.
        vocab_size: Rows of the vocabulary matrices.
        tied_embeddings: Whether the output head is the embedding matrix.
        max_positions: Longest request in tokens; a longer one is refused.
        dtype_bytes: Bytes of a weight.
        qk_norm: Whether queries and keys have an RMS norm over head_dim (Qwen3).
        qkv_bias: Whether the query, key and value projections have a bias.
        output_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the MLP's projections have a bias.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    dtype_bytes: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for item in fields(ModelSpec):
            value = getattr(self, item.name)
            if item.type is int and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise SimError(
                    f"model {self.name!r}: {item.name} must be a positive whole number, got "
                    f"{value!r}"
                )
        if self.num_query_heads % self.num_kv_heads:
            raise SimError(
                f"model {self.name!r}: {self.num_query_heads} query heads do not divide "
                f"evenly among {self.num_kv_heads} KV heads"
            )

    @property
    def query_width(self) -> int:
        """Values of one token's queries in one layer."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Weights of a layer's projections: query, key, value, output, gate, up and down."""
        attention = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights; a tied head is counted once."""
        small = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        small += (self.query_width + 2 * self.kv_width) if self.qkv_bias else 0
        small += self.hidden_size if self.output_bias else 0
        small += (2 * self.intermediate_size + self.hidden_size) if self.mlp_bias else 0
        layers = self.num_layers * (self.matrix_parameters_per_layer + small)
        vocabulary = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return layers + vocabulary + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in GPU memory."""
        return self.num_parameters * self.dtype_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step reads: all except an input embedding that is not the
        output head.

        A step reads only single rows of such an embedding.
        """
        unread = 0 if self.tied_embeddings else self.embedding_parameters
        return (self.num_parameters - unread) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.kv_width * self.dtype_bytes

    @property
    def layer_flops_per_token(self) -> int:
        """Operations of the layers' projections for one token; attention itself is not included."""
        return 2 * self.num_layers * self.matrix_parameters_per_layer

    @property
    def head_flops_per_row(self) -> int:
        """Operations of the output head for one row of logits."""
        return 2 * self.embedding_parameters

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations of attention for one pair of a query token and a key token.

        They are q.k and p.v in all layers and query heads.
        """
        return 4 * self.num_layers * self.query_width

    @property
    def profile_shape(self) -> dict[str, int]:
        """The sizes that a measured profile stores for the model, under the profile's keys."""
        return {key: getattr(self, name) for key, name in PROFILE_SHAPE.items()}


# Keys of a profile's `shape` (a contract) and the fields that they stand for.
PROFILE_SHAPE: Mapping[str, str] = {
    "num_layers": "num_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "num_query_heads": "num_query_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}
# Values of each model's public config.json on the Hugging Face hub.
MODELS: Mapping[str, ModelSpec] = {
    model.name: model
    for model in (
        ModelSpec("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151_936, True, 40_960, qk_norm=True),
        ModelSpec("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151_936, True, 40_960, qk_norm=True),
        ModelSpec("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151_936, True, 40_960, qk_norm=True),
        ModelSpec("qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False, 40_960, qk_norm=True),
        ModelSpec("qwen3-14b", 40, 5120, 17_408, 40, 8, 128, 151_936, False, 40_960, qk_norm=True),
        ModelSpec("qwen3-32b", 64, 5120, 25_600, 64, 8, 128, 151_936, False, 40_960, qk_norm=True),
        ModelSpec(
            "deepseek-r1-distill-llama-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072
        ),
        ModelSpec("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49_152, True, 8192),
    )
}
# the engine's name of the model that an installed package contains
ALIASES = {"smollm2": "smollm2-135m"}


def find_model(name: str) -> ModelSpec:
    """Return the row of that name, or the model that a config.json describes.

    Args:
        name: Name or alias of a row, where case and a hub organisation before `/` do not matter; or
            the path of a config.json or of its folder. It is a path if it ends in `.json` or is an
            existing directory.

    Returns:
        The model.

    Raises:
        SimError: There is neither a row nor a readable configuration; the message names the nearest
            row and all of them.
    """
    short = name.lower().rsplit("/", 1)[-1]
    model = MODELS.get(ALIASES.get(short, short))
    if model is not None:
        return model
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return read_model_config(path)
    also = "or the path of a Hugging Face config.json"
    raise SimError(unknown_choice("model", name.rsplit("/", 1)[-1], MODELS, also))


# config.json

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Architectures that are modelled, with their `model_type`.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
LLAMA_MAX_POSITIONS = 2048  # limit of a Llama configuration that names none


def read_model_config(path: Path | str) -> ModelSpec:
    """Return the dense model that a config.json describes. The folder's name becomes the model's
    name.

    Args:
        path: The config.json, or its folder.

    Returns:
        The model, with the dtype that the configuration names (bfloat16 if it names none).

    Raises:
        SimError: The file cannot be read, or names something that is not modelled; the message says
            which.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    config = _read_object(path)
    where = str(path)
    family = _family(config, where)
    _refuse_unmodelled(config, where)
    return spec_from_config(
        config,
        family,
        name=path.resolve().parent.name if path.name == "config.json" else path.stem,
        where=where,
        dtype_bytes=_dtype_bytes(config, where),
    )


def spec_from_config(
    config: Mapping[str, Any], family: str, *, name: str, where: str, dtype_bytes: int = 2
) -> ModelSpec:
    """Return the shape of a dense Llama, Mistral, Qwen2 or Qwen3 model.

    Args:
        config: Content of a config.json.
        family: `model_type` of one of `ARCHITECTURES`; some keys have another meaning in some
            families.
        name: Name of the model.
        where: First words of an error message.
        dtype_bytes: Bytes of a weight.

    Returns:
        The model's shape.

    Raises:
        SimError: A key is missing, or a size is not a positive whole number.
    """
    if missing := [key for key in _REQUIRED if config.get(key) is None]:
        raise SimError(f"{where}: missing key {', '.join(repr(key) for key in missing)}")
    num_query_heads = _whole(config, "num_attention_heads", where)
    hidden_size = _whole(config, "hidden_size", where)
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        name=name,
        num_layers=_whole(config, "num_hidden_layers", where),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size", where),
        num_query_heads=num_query_heads,
        num_kv_heads=_whole_of_llama(config, "num_key_value_heads", family, num_query_heads, where),
        head_dim=_head_dim(config, family, hidden_size, num_query_heads, where),
        vocab_size=_whole(config, "vocab_size", where),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),  # the default of all four
        max_positions=_whole_of_llama(
            config, "max_position_embeddings", family, LLAMA_MAX_POSITIONS, where
        ),
        dtype_bytes=dtype_bytes,
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",  # Qwen2 always has one and no key for it
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a config.json, None if every layer sees all positions.

    A window that covers all positions counts as None.
    """
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if isinstance(kinds, list):
        uses = "sliding_attention" in kinds
    else:
        uses = bool(config.get("use_sliding_window", True))
    if not uses or not isinstance(window, int):
        return None
    positions = config.get("max_position_embeddings")
    return None if isinstance(positions, int) and window >= positions else window


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimError(
            f"cannot read model configuration {path}: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise SimError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SimError(
            f"{path}: a model configuration is a JSON object, this is a {type(config).__name__}"
        )
    return config


def _family(config: Mapping[str, Any], where: str) -> str:
    supported = ", ".join(ARCHITECTURES)
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise SimError(f"{where}: missing key 'architectures'; supported: {supported}")
    architecture = named[0]
    if architecture not in ARCHITECTURES:
        what = "a mixture of experts" if _num_experts(config) else "an architecture"
        raise SimError(
            f"{where}: {architecture} is {what} that is not modelled; supported: {supported}"
        )
    return ARCHITECTURES[architecture]


def _num_experts(config: Mapping[str, Any]) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return max((value for key in keys if isinstance(value := config.get(key), int)), default=0)


def _refuse_unmodelled(config: Mapping[str, Any], where: str) -> None:
    if experts := _num_experts(config):
        raise SimError(
            f"{where}: a mixture of {experts} experts is not modelled, only dense models are"
        )
    if quantization := config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "unnamed")
            if isinstance(quantization, dict)
            else quantization
        )
        raise SimError(
            f"{where}: quantised weights ({method}) are not modelled, only {', '.join(DTYPE_BYTES)}"
        )
    kinds = config.get("layer_types") or []
    other = sorted(
        {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])} - {"full_attention"}
    )
    if other:
        raise SimError(
            f"{where}: layers of type {', '.join(other)} are not modelled, only full_attention"
        )
    if window := sliding_window(config):
        raise SimError(f"{where}: sliding_window={window} is not modelled, only full attention")


def _whole(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SimError(f"{where}: {key} must be a positive whole number, got {value!r}")
    return value


def _whole_of_llama(
    config: Mapping[str, Any], key: str, family: str, llama_default: int, where: str
) -> int:
    """Return a size that may be missing in old Llama configurations only."""
    if config.get(key) is not None:
        return _whole(config, key, where)
    if family != "llama":
        raise SimError(f"{where}: missing key {key!r}")
    return llama_default


def _head_dim(
    config: Mapping[str, Any], family: str, hidden_size: int, num_query_heads: int, where: str
) -> int:
    if config.get("head_dim") is not None:
        return _whole(config, "head_dim", where)
    if family == "qwen3":  # its head_dim is not hidden_size / heads
        raise SimError(f"{where}: missing key 'head_dim'")
    if hidden_size % num_query_heads:
        raise SimError(
            f"{where}: missing key 'head_dim'; hidden_size {hidden_size} / {num_query_heads} heads "
            f"is not whole"
        )
    return hidden_size // num_query_heads


def _dtype_bytes(config: Mapping[str, Any], where: str) -> int:
    dtype = config.get("dtype", config.get("torch_dtype")) or "bfloat16"  # the engine's default
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise SimError(
            f"{where}: dtype {dtype!r} is not modelled; choices: {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]
