"""The configuration of a decoder: the numbers of a `config.json`, and the built-in shapes of
`dummy:NAME`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from zlab.engine.errors import ModelError
from zlab.sim.specs import MODELS, ModelSpec, SimError, sliding_window, spec_from_config
from zlab.traces.choices import unknown_choice

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
)  # families of the own decoder, as `model_type` in config.json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the whole head. `linear` uses `factor`, `llama3` uses all
    fields.

    `divisors`, one for each frequency, is what a GGUF file has in place of a rule.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelSpec):
    """A model's shape and what a decoder needs besides it.

    `dtype_bytes` is that of the configuration's own dtype or 2, whatever dtype the engine uses.

    Attributes:
        family: `model_type` of the config.json.
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary position embedding.
        eos_token_ids: ids of the end-of-sequence tokens.
    """

    family: str = ""
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        try:
            ModelSpec.__post_init__(self)
        except SimError as error:
            raise ModelError(str(error)) from error
        if self.head_dim % 2:
            raise ModelError(
                f"model {self.name!r}: head_dim must be even to be rotated, got {self.head_dim}"
            )

    @staticmethod
    def of(spec: ModelSpec, **more: Any) -> "ModelConfig":
        """Return a configuration with the shape of `spec` and the fields in `more`."""
        shape = {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}
        return ModelConfig(**shape, **more)

    @property
    def qkv_width(self) -> int:
        """Rows of the merged query, key and value projection."""
        return self.query_width + 2 * self.kv_width


# Values of each model's public config.json and generation_config.json on the Hugging Face hub;
# the shapes are the rows of `zlab.sim.specs.MODELS`.
_QWEN3: Mapping[str, Any] = {
    "family": "qwen3",
    "rope": Rope(theta=1_000_000.0),
    "eos_token_ids": (151_645, 151_643),
}
_LLAMA: Mapping[str, Mapping[str, Any]] = {
    "deepseek-r1-distill-llama-8b": {
        "rope": Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        "eos_token_ids": (128_001,),
    },
    "smollm2-135m": {"rope": Rope(100_000.0), "eos_token_ids": (2,)},
}
ROWS: Mapping[str, ModelConfig] = {
    name: ModelConfig.of(spec, **_QWEN3)
    if spec.qk_norm
    else ModelConfig.of(spec, family="llama", rms_norm_eps=1e-5, **_LLAMA[name])
    for name, spec in MODELS.items()
} | {
    # The smallest shape that has every part, to see a scheduler decide on any machine.
    "tiny": ModelConfig(
        "tiny", 2, 32, 64, 4, 2, 16, 1024, True, 40_960,
        qk_norm=True, family="qwen3", eos_token_ids=(2,),
    )
}  # fmt: skip


def find_row(name: str) -> ModelConfig:
    """Return the built-in shape of that name. Case and a hub organisation before `/` are ignored.

    Raises:
        ModelError: there is no such shape; the message names the nearest and all of them.
    """
    row = ROWS.get(name.lower().rsplit("/", 1)[-1])
    if row is None:
        raise ModelError(unknown_choice("model shape", name, ROWS, "or a config.json"))
    return row


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is unreadable, no JSON, or no object.
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
    """Return why the own decoder cannot run this config.json, so that transformers must; None when
    it can.
    """
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


def config_from_hf(
    config: Mapping[str, Any], *, name: str, eos_token_ids: tuple[int, ...] = ()
) -> ModelConfig:
    """Return the own decoder's configuration for the content of a config.json.

    Args:
        config: the content.
        name: names the model in messages.
        eos_token_ids: tokens that end an output.

    Raises:
        ModelError: the decoder lacks a feature of the model (`own_decoder_lacks`), or a key is
            missing.
    """
    if lacks := own_decoder_lacks(config):
        raise ModelError(f"model {name!r}: the own decoder has no {lacks}")
    family = config["model_type"]
    try:
        spec = spec_from_config(config, family, name=name, where=f"model {name!r}")
    except SimError as error:
        raise ModelError(str(error)) from error
    return ModelConfig.of(
        spec,
        family=family,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        eos_token_ids=eos_token_ids or as_ids(config.get("eos_token_id")),
    )


def as_ids(value: Any) -> tuple[int, ...]:
    """Return a token id, a list of ids or None as a tuple."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def without_window(config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` where a layer has a sliding window, which the paged cache does not
    support.
    """
    if window := sliding_window(config):
        raise ModelError(
            f"model {name!r} has layers with a sliding window of {window}; the paged cache has none"
        )


def _rope_values(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Return theta and the rule, from `rope_parameters` (transformers 5) or the older
    `rope_scaling`.
    """
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
