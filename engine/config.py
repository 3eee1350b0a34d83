"""What a decoder looks like: the numbers of a `config.json`, and the rows that `dummy:NAME` knows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError, nearest

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
FAMILIES = ("llama", "qwen2", "qwen3")  # what the own decoder covers, as `model_type` in config.json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the whole head; `linear` uses `factor`, `llama3` all fields.

    `divisors`, one a frequency, is what a GGUF file carries in place of a rule.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense Llama-like decoder: grouped-query attention, RMS norm before each half, gated SiLU feed-forward."""

    name: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool  # the output head is the embedding matrix
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    qk_norm: bool = False  # RMS norm over head_dim of queries and keys, before the rotation (Qwen3)
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_query_heads", "num_kv_heads", "head_dim")
        for field in (*sizes, "vocab_size", "max_positions"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"model {self.name!r}: {field} must be a positive whole number, got {value!r}")
        if self.num_query_heads % self.num_kv_heads:
            raise ModelError(
                f"model {self.name!r}: {self.num_query_heads} query heads do not divide evenly among "
                f"{self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"model {self.name!r}: head_dim must be even to be rotated, got {self.head_dim}")

    @property
    def query_width(self) -> int:
        """Values of one token's queries in one layer."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of the merged query, key and value projection."""
        return self.query_width + 2 * self.kv_width


def _qwen3(name: str, *sizes: int, tied: bool) -> ModelConfig:
    layers, hidden, intermediate, query_heads = sizes
    return ModelConfig(
        name=name, family="qwen3", num_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
        num_query_heads=query_heads, num_kv_heads=8, head_dim=128, vocab_size=151_936, tied_embeddings=tied,
        max_positions=40_960, rope=Rope(theta=1_000_000.0), qk_norm=True, eos_token_ids=(151_645, 151_643),
    )  # fmt: skip


# Values of each model's public config.json and generation_config.json on the Hugging Face hub.
ROWS: Mapping[str, ModelConfig] = {
    row.name: row
    for row in (
        _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 9728, 32, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12_288, 32, tied=False),
        _qwen3("qwen3-14b", 40, 5120, 17_408, 40, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 25_600, 64, tied=False),
        ModelConfig(
            "deepseek-r1-distill-llama-8b", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072, 1e-5,
            Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192), eos_token_ids=(128_001,),
        ),
        ModelConfig(
            "smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49_152, True, 8192, 1e-5, Rope(100_000.0),
            eos_token_ids=(2,),
        ),
        ModelConfig(  # no model's shape: the least that has every part, to see a scheduler decide on any machine
            "tiny", "qwen3", 2, 32, 64, 4, 2, 16, 1024, True, 40_960, qk_norm=True, eos_token_ids=(2,),
        ),
    )
}  # fmt: skip


def find_row(name: str) -> ModelConfig:
    """The shape of that name, case and a hub organisation before `/` ignored.

    Raises:
        ModelError: no such row; the message names the nearest and all of them.
    """
    row = ROWS.get(name.lower().rsplit("/", 1)[-1])
    if row is None:
        raise ModelError(
            f"unknown model shape {name!r}{nearest(name.lower(), ROWS)} (choices: {', '.join(ROWS)}, or a config.json)"
        )
    return row


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: unreadable, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, this is a {type(content).__name__}")
    return content


def own_decoder_lacks(config: Mapping[str, Any]) -> str | None:
    """Why the own decoder cannot run this config.json (transformers' modules must), or None when it can."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type {family!r} is not one of {', '.join(FAMILIES)}"
    if (activation := config.get("hidden_act", "silu")) != "silu":
        return f"activation {activation!r}"
    if (kind := _rope_values(config)[1].get("rope_type", "default")) not in ROPE_KINDS:
        return f"rope type {kind!r}"
    if _rope_values(config)[1].get("partial_rotary_factor", 1.0) != 1.0:
        return "rotation of a part of the head"
    return None


def config_from_hf(config: Mapping[str, Any], *, name: str, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The own decoder's configuration out of the content of a config.json.

    Raises:
        ModelError: something that the own decoder does not have (`own_decoder_lacks`), or a missing key.
    """
    if lacks := own_decoder_lacks(config):
        raise ModelError(f"model {name!r}: the own decoder has no {lacks}")
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [key for key in required if config.get(key) is None]:
        raise ModelError(f"model {name!r}: missing key {', '.join(missing)} in its configuration")
    family = config["model_type"]
    query_heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        name=name,
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_query_heads=query_heads,
        num_kv_heads=config.get("num_key_value_heads") or query_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // query_heads,
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.get("max_position_embeddings") or 2048,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or bias,  # Qwen2 always has one and no key for it
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=eos_token_ids or as_ids(config.get("eos_token_id")),
    )


def as_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or nothing, as a tuple."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def effective_window(config: Mapping[str, Any]) -> int | None:
    """The sliding window if any layer of this config.json has one shorter than the context."""
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    uses = config.get("use_sliding_window", True) if kinds is None else "sliding_attention" in kinds
    if not uses or not isinstance(window, int) or window >= (config.get("max_position_embeddings") or window + 1):
        return None
    return window


def without_window(config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` where a layer sees a window of the context only: the paged cache keeps no such layer."""
    if window := effective_window(config):
        raise ModelError(f"model {name!r} has layers with a sliding window of {window}; the paged cache has none")


def _rope_values(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Theta and the rule, from the form of transformers 5 (`rope_parameters`) or the older `rope_scaling`."""
    rule = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "rope_type" not in rule and "type" in rule:
        rule = {**rule, "rope_type": rule["type"]}
    return float(rule.get("rope_theta") or config.get("rope_theta") or 10_000.0), rule


def _rope(config: Mapping[str, Any]) -> Rope:
    theta, rule = _rope_values(config)
    positions = config.get("max_position_embeddings") or 8192
    return Rope(
        theta=theta,
        kind=rule.get("rope_type", "default"),
        factor=float(rule.get("factor", 1.0)),
        low_freq_factor=float(rule.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rule.get("high_freq_factor", 4.0)),
        original_max_positions=int(rule.get("original_max_position_embeddings") or positions),
    )
