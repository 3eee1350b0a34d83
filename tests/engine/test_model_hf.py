"""Transformers' own modules on packed tokens: right where they can be run so, refused where they would be wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.hf_model import HuggingFaceModel
from engine.loading import load_model
from tests.engine.dense_context import DenseContext
from tests.engine.test_model import expected_logits, random_ids
from tests.engine.tiny_models import TINY, save_tiny

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "olmo2": (transformers.Olmo2Config, {}),
    "granite, own scale of attention": (transformers.GraniteConfig, {"attention_multiplier": 0.2}),
    "qwen3 mixture of experts": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt-neox": (transformers.GPTNeoXConfig, {"num_key_value_heads": 4}),
    "llama, yarn": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
}  # fmt: skip


def save(config_class: Any, changes: dict[str, Any], folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config_class(**(SIZES | changes)), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def chunked_logits(folder: Path, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    """The logits of a sequence in chunks and single tokens, packed at the end with the same tokens in one piece."""
    loaded = load_model(str(folder), **how)
    assert isinstance(loaded.model, HuggingFaceModel)
    context = DenseContext(loaded.config.num_layers, 2)
    parts = []
    whole = torch.arange(len(ids))
    with torch.inference_mode():
        for start, end in ((0, 17), (17, 18), (18, len(ids))):
            other = end == len(ids)
            context.begin([(0, end - start), *([(1, len(ids))] if other else [])])
            tokens = torch.cat([ids[start:end], *([ids] if other else [])])
            positions = torch.cat([whole[start:end], *([whole] if other else [])])
            rows = torch.arange(end - start)
            parts.append(loaded.model.logits(loaded.model.forward(tokens, positions, context, rows)))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["qwen3", "llama-scaled"])
def test_the_families_of_the_own_decoder(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    assert kind in TINY
    ids = random_ids(1, 40)
    found = chunked_logits(tmp_path, ids, implementation="transformers")
    torch.testing.assert_close(found, expected_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    model = save(*OTHERS[kind], tmp_path)
    ids = random_ids(2, 40)
    found = chunked_logits(tmp_path, ids)
    torch.testing.assert_close(found, expected_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_warming_up_runs_the_head_for_every_number_of_rows(tmp_path: Path) -> None:
    save(*OTHERS["olmo2"], tmp_path)
    model = load_model(str(tmp_path)).model
    assert isinstance(model, HuggingFaceModel)
    shapes: list[torch.Size] = []
    model._head.register_forward_hook(lambda _, __, logits: shapes.append(logits.shape))
    model.warm_up((1, 8), (1, 3, 16))
    assert shapes == [(1, 97), (3, 97), (16, 97)]


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (transformers.GraniteConfig, {"logits_scaling": 8.0}, "gives other logits"),
        (transformers.MistralConfig, {"sliding_window": 16}, "sliding window of 16"),
        (transformers.GptOssConfig, {"num_local_experts": 2, "head_dim": 8, "sliding_window": 16}, "sliding window"),
        (transformers.Gemma2Config, {"head_dim": 8, "sliding_window": 256}, "needs softcap=50"),
        (transformers.MambaConfig, {}, "num_attention_heads and hidden_size are not in its configuration"),
    ],
    ids=["logit scale", "sliding window", "sinks", "capped logits", "no attention"],
)
def test_what_paged_attention_would_get_wrong_is_refused(
    config_class: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if config_class is transformers.MambaConfig:
        transformers.MambaForCausalLM(
            config_class(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
        ).save_pretrained(tmp_path)
    else:
        save(config_class, changes, tmp_path)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path))
