"""Tiny random checkpoints made by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

TINY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "rope_theta": 1_000_000.0, "tie_word_embeddings": False},
    "qwen3-bias": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "llama": {"mlp_bias": True, "attention_bias": True},
    "llama-scaled": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
}  # fmt: skip
CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
}


def save_tiny(
    kind: str, folder: Path, *, seed: int = 0, shard_size: str = "50GB", **changes: Any
) -> transformers.PreTrainedModel:
    """A random float32 model of `TINY[kind]`, saved in `folder` as config.json and safetensors."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    config = CONFIGS[kind.split("-")[0]](**(sizes | TINY[kind] | changes))
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initialisation leaves biases at 0 and norms at 1, which would hide them
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of the config.json in `folder`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
