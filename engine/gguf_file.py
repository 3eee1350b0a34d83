"""Reading a GGUF file: its configuration in the own decoder's terms, and its tensors one by one, dequantised."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import FAMILIES, ModelConfig, Rope
from engine.errors import ModelError
from engine.gguf_header import StoredTensor, read_header
from engine.weights import NamedReader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """One GGUF file of the Llama, Qwen2 or Qwen3 family."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: not a GGUF file, or of another family.
        """
        self.path = path
        header = read_header(path)
        self._values, self._tensors = header.values, header.tensors
        self.family = str(self._value("general.architecture", ""))
        if self.family not in FAMILIES:
            raise ModelError(f"{path}: architecture {self.family!r}; GGUF files are read of {', '.join(FAMILIES)}")
        if "token_embd.weight" not in self._tensors:
            raise ModelError(f"{path}: tensor 'token_embd.weight' is missing")

    def config(self, name: str) -> ModelConfig:
        """The decoder that the file describes.

        Raises:
            ModelError: a key is missing, or the rotation is scaled by a rule that is not read from GGUF.
        """
        query_heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        eos = self._value("tokenizer.ggml.eos_token_id", None)
        return ModelConfig(
            name=name,
            family=self.family,
            num_layers=self._number("block_count"),
            hidden_size=hidden,
            intermediate_size=self._number("feed_forward_length"),
            num_query_heads=query_heads,
            num_kv_heads=int(self._value(f"{self.family}.attention.head_count_kv", query_heads)),
            head_dim=int(self._value(f"{self.family}.attention.key_length", hidden // query_heads)),
            vocab_size=self._tensors["token_embd.weight"].shape[0],
            tied_embeddings="output.weight" not in self._tensors,
            max_positions=self._number("context_length"),
            rms_norm_eps=float(self._value(f"{self.family}.attention.layer_norm_rms_epsilon", 1e-6)),
            rope=self._rope(),
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_down.bias" in self._tensors,
            eos_token_ids=() if eos is None else (int(eos),),
        )

    def tensors(self) -> Iterator[NamedReader]:
        """Every tensor under its Hugging Face name, dequantised to float32 when it is read."""
        query_heads = self._number("attention.head_count")
        heads = {
            "attn_q": query_heads,
            "attn_k": int(self._value(f"{self.family}.attention.head_count_kv", query_heads)),
        }
        for stored_name, tensor in self._tensors.items():
            if stored_name == ROPE_DIVISORS:
                continue
            # Llama's query and key rows are kept in the order of its own rotation, pair beside pair.
            interleaved = heads.get(stored_name.split(".")[-2]) if self.family == "llama" else None

            def read(
                axis: int, start: int, end: int, tensor: StoredTensor = tensor, num_heads: int | None = interleaved
            ) -> torch.Tensor:
                values = tensor.values() if num_heads is None else _halves(tensor.values(), num_heads)
                return torch.from_numpy(values).narrow(axis, start, end - start)

            yield self._translated(stored_name), tensor.shape, read

    def _translated(self, stored_name: str) -> str:
        *path, kind = stored_name.split(".")
        if len(path) == 1 and path[0] in _TOP:
            return f"{_TOP[path[0]]}.{kind}"
        if len(path) == 3 and path[0] == "blk" and path[2] in _OF_LAYER:
            return f"model.layers.{path[1]}.{_OF_LAYER[path[2]]}.{kind}"
        raise ModelError(f"{self.path}: tensor {stored_name!r} has no place in a {self.family} decoder")

    def _rope(self) -> Rope:
        theta = float(self._value(f"{self.family}.rope.freq_base", 10_000.0))
        kind = self._value(f"{self.family}.rope.scaling.type", "none")
        if kind == "linear":
            return Rope(theta, "linear", float(self._value(f"{self.family}.rope.scaling.factor", 1.0)))
        if kind != "none":
            raise ModelError(f"{self.path}: rope scaling {kind!r} is not read from GGUF; linear and none are")
        divisors = self._tensors.get(ROPE_DIVISORS)
        if divisors is None:
            return Rope(theta)
        return Rope(theta, divisors=tuple(divisors.values().tolist()))

    def _number(self, key: str) -> int:
        value = self._value(f"{self.family}.{key}", None)
        if value is None:
            raise ModelError(f"{self.path}: missing key {self.family}.{key}")
        return int(value)

    def _value(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)


def _halves(values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of every head from pair order (0, 1), (2, 3) ... to first halves, then second halves."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
