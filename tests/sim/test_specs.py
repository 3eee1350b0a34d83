"""Rows of cards and models, sizes derived from them, and models read from a config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from zlab.sim.specs import (
    GPUS,
    MODELS,
    ModelSpec,
    SimError,
    find_gpu,
    find_model,
    read_model_config,
)

# Totals as published: the Qwen3 technical report and model cards (0.6 B and 1.7 B with the tied
# head counted once), the
# hub's own count for DeepSeek-R1-Distill-Llama-8B and SmolLM2-135M.
PUBLISHED_PARAMETERS = {
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "deepseek-r1-distill-llama-8b": 8.03e9,
    "smollm2-135m": 134.5e6,
}
PUBLISHED_NON_EMBEDDING = {
    "qwen3-0.6b": 0.44e9,
    "qwen3-1.7b": 1.4e9,
    "qwen3-4b": 3.6e9,
    "qwen3-8b": 6.95e9,
    "qwen3-14b": 13.2e9,
    "qwen3-32b": 31.2e9,
}

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_config(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (QWEN3_8B | changes).items() if value != "absent"}
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_the_published_totals_cover_every_row() -> None:
    assert set(PUBLISHED_PARAMETERS) == set(MODELS)


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_parameters_match_the_published_total_within_one_per_cent(
    name: str, published: float
) -> None:
    assert MODELS[name].num_parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("name", "published"), PUBLISHED_NON_EMBEDDING.items())
def test_parameters_without_embeddings_match_the_model_cards(name: str, published: float) -> None:
    model = MODELS[name]
    embeddings = model.embedding_parameters * (1 if model.tied_embeddings else 2)
    assert model.num_parameters - embeddings == pytest.approx(
        published, rel=0.02
    )  # cards round to two digits


def test_qwen3_8b_by_hand() -> None:
    model = MODELS["qwen3-8b"]
    # A layer: q and o 4096 x 4096, k and v 4096 x 1024, gate, up and down 4096 x 12288.
    matrices = 2 * 16_777_216 + 2 * 4_194_304 + 3 * 50_331_648
    assert model.matrix_parameters_per_layer == matrices == 192_937_984
    # Beside them two norms of 4096 and two of 128; then two vocabulary matrices and the last norm.
    assert (
        model.num_parameters
        == 36 * (matrices + 8192 + 256) + 2 * 622_329_856 + 4096
        == 8_190_735_360
    )
    assert model.weight_bytes == 16_381_470_720
    assert model.step_weight_bytes == 16_381_470_720 - 2 * 622_329_856
    assert model.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456
    assert model.layer_flops_per_token == 2 * 36 * 192_937_984
    assert model.head_flops_per_row == 2 * 622_329_856
    assert model.attention_flops_per_pair == 4 * 36 * 32 * 128
    assert model.max_positions == 40_960


def test_a_step_reads_a_tied_embedding_because_it_is_the_head() -> None:
    model = MODELS["smollm2-135m"]
    assert model.step_weight_bytes == model.weight_bytes == 2 * 134_515_008


def test_step_bytes_are_those_of_the_peers_measurement() -> None:
    # "weights + KV read": 34.5, 53.8 and 92.5 GB at batch 64, 128 and 256 with 2,048 tokens each.
    model = MODELS["qwen3-8b"]
    for batch, gigabytes in ((64, 34.5), (128, 53.8), (256, 92.5)):
        assert (
            model.step_weight_bytes + batch * 2048 * model.kv_bytes_per_token
        ) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_every_card_is_sane_and_named_by_its_row() -> None:
    assert list(GPUS) == ["h200", "h100", "a100-80", "a100-40", "l40s", "rtx4090"]
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.pcie_bytes_per_s < gpu.memory_bandwidth_bytes_per_s < gpu.bf16_flops
    # The driver's total is a little less than the card's nominal memory.
    nominal_gib = {"h200": 141, "h100": 80, "a100-80": 80, "a100-40": 40, "l40s": 45, "rtx4090": 24}
    for name, gib in nominal_gib.items():
        assert 0.97 * gib < GPUS[name].memory_bytes / 2**30 < gib


def test_names_are_found_in_any_case_and_with_their_organisation() -> None:
    assert find_gpu("H200") is GPUS["h200"]
    assert find_model("Qwen/Qwen3-8B") is MODELS["qwen3-8b"]


@pytest.mark.parametrize(
    ("asked", "near"), [("h20", "h200"), ("a100", "a100-80"), ("RTX-4090", "rtx4090")]
)
def test_an_unknown_gpu_names_the_nearest_and_the_choices(asked: str, near: str) -> None:
    with pytest.raises(SimError, match=f"unknown GPU '{asked}'; did you mean '{near}'\\?.*l40s"):
        find_gpu(asked)


def test_an_unknown_model_names_the_nearest_and_the_choices() -> None:
    with pytest.raises(
        SimError,
        match=r"unknown model 'qwen3-9b'; did you mean 'qwen3-8b'\?.*smollm2-135m.*config\.json",
    ):
        find_model("qwen3-9b")


def test_a_name_like_nothing_gets_no_hint() -> None:
    with pytest.raises(SimError) as caught:
        find_gpu("xyzzy")
    assert "did you mean" not in str(caught.value)


def test_a_config_gives_the_same_model_as_the_row(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    path = write_config(folder)
    assert read_model_config(path) == MODELS["qwen3-8b"]
    assert find_model(str(path)) == find_model(str(folder)) == MODELS["qwen3-8b"]


def test_a_llama_config_without_newer_keys_is_read(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        architectures=["LlamaForCausalLM"],
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads="absent",
        head_dim="absent",
        vocab_size=49152,
        tie_word_embeddings=True,
        torch_dtype="absent",
        dtype="float32",
    )
    model = read_model_config(path)
    assert (model.num_kv_heads, model.head_dim, model.qk_norm) == (9, 64, False)
    assert model.dtype_bytes == 4
    # Multi-head attention: SmolLM2 has 3 KV heads and so 2 x 576 x 384 weights a layer less.
    assert model.num_parameters == 134_515_008 + 30 * 2 * 576 * 384


def test_a_qwen2_config_counts_its_unnamed_biases(tmp_path: Path) -> None:
    # Qwen2.5-7B: 7,615,616,512 parameters on the hub.
    path = write_config(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim="absent",
        vocab_size=152064,
        sliding_window=131072,
    )
    assert read_model_config(path).num_parameters == 7_615_616_512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is an architecture.*supported: LlamaForCausalLM",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
            "Qwen3MoeForCausalLM is a mixture of experts",
        ),
        ({"architectures": "absent"}, "missing key 'architectures'"),
        ({"num_local_experts": 8}, "mixture of 8 experts"),
        (
            {"hidden_size": "absent", "vocab_size": "absent"},
            "missing key 'hidden_size', 'vocab_size'",
        ),
        ({"max_position_embeddings": "absent"}, "missing key 'max_position_embeddings'"),
        ({"num_key_value_heads": "absent"}, "missing key 'num_key_value_heads'"),
        ({"head_dim": "absent"}, "missing key 'head_dim'"),
        (
            {"num_hidden_layers": 36.5},
            "num_hidden_layers must be a positive whole number, got 36.5",
        ),
        ({"num_key_value_heads": 5}, "32 query heads do not divide evenly among 5 KV heads"),
        (
            {"torch_dtype": "float8_e4m3fn"},
            "dtype 'float8_e4m3fn' is not modelled; choices: bfloat16",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
        (
            {"sliding_window": 4096, "use_sliding_window": "absent"},
            "sliding_window=4096 is not modelled",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layers of type linear_attention",
        ),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "head_dim": "absent",
                "num_attention_heads": 24,
            },
            "hidden_size 4096 / 24 heads is not whole",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_config(tmp_path, **changes)
    with pytest.raises(SimError, match=message):
        read_model_config(path)


def test_a_window_that_covers_every_position_is_full_attention(tmp_path: Path) -> None:
    assert (
        read_model_config(
            write_config(tmp_path, sliding_window=40960, use_sliding_window=True)
        ).num_layers
        == 36
    )


def test_unreadable_configurations_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(SimError, match=r"cannot read model configuration .*nowhere\.json"):
        find_model(str(tmp_path / "nowhere.json"))
    broken = tmp_path / "config.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(SimError, match="not JSON"):
        read_model_config(broken)
    broken.write_text("[]", encoding="utf-8")
    with pytest.raises(SimError, match="is a JSON object, this is a list"):
        read_model_config(broken)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(SimError, match="num_layers must be a positive whole number, got 0"):
        ModelSpec("none", 0, 64, 64, 4, 2, 16, 100, True, 128)
