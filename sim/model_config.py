"""How a Hugging Face `config.json` becomes a `Model`; what the simulator does not model is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.errors import SimError
from sim.model_shape import Model

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def read_model_config(path: Path) -> Model:
    """The dense model that `path` (a config.json, or its folder) describes; the folder gives the name.

    Raises:
        SimError: the file cannot be read, or names something that is not modelled; the message says which.
    """
    if path.is_dir():
        path = path / "config.json"
    config = _read_object(path)
    architecture = _architecture(config, path)
    _refuse_unmodelled(config, path)
    missing = [key for key in (*_REQUIRED, "max_position_embeddings") if config.get(key) is None]
    if missing:
        raise SimError(f"{path}: missing key {', '.join(repr(key) for key in missing)}")
    num_query_heads = _whole(config, "num_attention_heads", path)
    hidden = _whole(config, "hidden_size", path)
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(config.get("attention_bias", False))
    return Model(
        name=path.resolve().parent.name if path.name == "config.json" else path.stem,
        num_layers=_whole(config, "num_hidden_layers", path),
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size", path),
        num_query_heads=num_query_heads,
        num_kv_heads=_num_kv_heads(config, architecture, num_query_heads, path),
        head_dim=_head_dim(config, architecture, hidden, num_query_heads, path),
        vocab=_whole(config, "vocab_size", path),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),  # the four architectures' own default
        max_positions=_whole(config, "max_position_embeddings", path),
        dtype_bytes=_dtype_bytes(config, path),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=bias or qwen2,  # Qwen2 always has one and no key for it
        output_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimError(f"cannot read model configuration {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SimError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SimError(f"{path}: a model configuration is a JSON object, this is a {type(config).__name__}")
    return config


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise SimError(f"{path}: missing key 'architectures'; supported: {', '.join(ARCHITECTURES)}")
    architecture = named[0]
    if architecture not in ARCHITECTURES:
        what = "a mixture of experts" if _num_experts(config) else "an architecture"
        raise SimError(f"{path}: {architecture} is {what} that is not modelled; supported: {', '.join(ARCHITECTURES)}")
    return str(architecture)


def _num_experts(config: Mapping[str, Any]) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return max((value for key in keys if isinstance(value := config.get(key), int)), default=0)


def _refuse_unmodelled(config: Mapping[str, Any], path: Path) -> None:
    if experts := _num_experts(config):
        raise SimError(f"{path}: a mixture of {experts} experts is not modelled, only dense models are")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise SimError(f"{path}: quantised weights ({method}) are not modelled, only {', '.join(DTYPE_BYTES)}")
    kinds = config.get("layer_types") or []
    other = sorted({str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])} - {"full_attention"})
    if other:
        raise SimError(f"{path}: layers of type {', '.join(other)} are not modelled, only full_attention")
    window = config.get("sliding_window")
    positions = config.get("max_position_embeddings")
    reaches_all = isinstance(window, int) and isinstance(positions, int) and window >= positions
    if window is not None and config.get("use_sliding_window", True) and not reaches_all:
        raise SimError(f"{path}: sliding_window={window} is not modelled, only full attention")


def _whole(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SimError(f"{path}: {key} must be a positive whole number, got {value!r}")
    return value


def _num_kv_heads(config: Mapping[str, Any], architecture: str, num_query_heads: int, path: Path) -> int:
    if config.get("num_key_value_heads") is not None:
        return _whole(config, "num_key_value_heads", path)
    if architecture == "LlamaForCausalLM":  # configurations older than grouped-query attention
        return num_query_heads
    raise SimError(f"{path}: missing key 'num_key_value_heads'")


def _head_dim(config: Mapping[str, Any], architecture: str, hidden: int, num_query_heads: int, path: Path) -> int:
    if config.get("head_dim") is not None:
        return _whole(config, "head_dim", path)
    if architecture == "Qwen3ForCausalLM":  # its head_dim is not hidden / heads
        raise SimError(f"{path}: missing key 'head_dim'")
    if hidden % num_query_heads:
        raise SimError(f"{path}: missing key 'head_dim'; hidden_size {hidden} / {num_query_heads} heads is not whole")
    return hidden // num_query_heads


def _dtype_bytes(config: Mapping[str, Any], path: Path) -> int:
    dtype = config.get("dtype", config.get("torch_dtype")) or "bfloat16"  # what the engine serves in
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise SimError(f"{path}: dtype {dtype!r} is not modelled; choices: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
