"""GGUF files: configuration and tensors, dequantised one by one.

The header follows ggml's specification, versions 2 and 3. It is read here because the reader of the
`gguf` package parses the vocabulary element by element, which takes seconds; this reader skips
strings in arrays.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from zlab.engine.errors import ModelError
from zlab.engine.model.loader import NamedReader
from zlab.engine.model.spec import FAMILIES, ModelConfig, Rope

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# Value types of the specification as `struct` formats; all are little-endian.
FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: `shape` has the slowest axis first; `data` is a mapped view that is not
    read yet.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[Any]]

    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the dequantised tensor, float32 and writable."""
        found = np.asarray(gguf.quants.dequantize(self.data, self.kind), dtype=np.float32)
        return np.require(found.reshape(self.shape), requirements=("C", "W"))


@dataclass(frozen=True)
class GgufHeader:
    """The header: `values` by key, with an array of strings represented by its length, and the
    tensors.
    """

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file, whose tensors stay mapped.

    Raises:
        ModelError: it cannot be read, is no GGUF file, or ends too early.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} as GGUF: {error}") from error
    try:
        return _Walk(mapped).header()
    except (struct.error, ValueError, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path} as GGUF: {error}") from error


class _Walk:
    """One pass over the bytes of a header."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._place = 0

    def header(self) -> GgufHeader:
        magic = self._mapped[:4]
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, not with b'GGUF'")
        self._place = 4
        if (version := self._take("I")) not in VERSIONS:
            raise ValueError(f"version {version}, of {VERSIONS} known")
        num_tensors, num_values = self._take("Q"), self._take("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(self._take("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = int(values.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-self._place // alignment) * alignment
        tensors = {
            name: self._tensor(start + offset, shape, kind) for name, offset, shape, kind in entries
        }
        return GgufHeader(values, tensors)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, offset, shape and type of the next tensor."""
        name = self._string()
        num_axes = self._take("I")
        shape = tuple(self._take("Q") for _ in range(num_axes))
        kind = self._take("I")
        return name, self._take("Q"), shape[::-1], kind

    def _tensor(self, start: int, shape: tuple[int, ...], kind_number: int) -> StoredTensor:
        kind = gguf.GGMLQuantizationType(kind_number)
        num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // num_values * num_bytes
        total = row_bytes * int(np.prod(shape[:-1], dtype=np.int64))
        data = np.frombuffer(self._mapped, dtype=np.uint8, count=total, offset=start)
        return StoredTensor(shape, kind, data.reshape(*shape[:-1], row_bytes))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(FORMATS[kind])
        element, count = self._take("I"), self._take("Q")
        if element == STRING:
            unpack = struct.Struct("<Q").unpack_from
            place = self._place
            for _ in range(count):
                place += 8 + unpack(self._mapped, place)[0]
            self._place = place
            return count
        return [self._value(element) for _ in range(count)]

    def _take(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self._mapped, self._place)[0]
        self._place += struct.calcsize("<" + form)
        return value

    def _string(self) -> str:
        length = self._take("Q")
        end = self._place + length
        if end > len(self._mapped):
            raise ValueError(f"a string of {length} bytes goes past the end")
        text = self._mapped[self._place : end].decode("utf-8")
        self._place = end
        return text


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """One GGUF file of the Llama, Qwen2 or Qwen3 family."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file is no GGUF file, or belongs to another family.
        """
        self.path = path
        header = read_header(path)
        self._values, self._tensors = header.values, header.tensors
        self.family = str(self._value("general.architecture", ""))
        if self.family not in FAMILIES:
            raise ModelError(
                f"{path}: architecture {self.family!r}; GGUF files are read of "
                f"{', '.join(FAMILIES)}"
            )
        if "token_embd.weight" not in self._tensors:
            raise ModelError(f"{path}: tensor 'token_embd.weight' is missing")

    def config(self, name: str) -> ModelConfig:
        """Return the decoder's configuration.

        Raises:
            ModelError: a key is missing, or the rotation is scaled by a rule that GGUF files do not
                give.
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
            rms_norm_eps=float(
                self._value(f"{self.family}.attention.layer_norm_rms_epsilon", 1e-6)
            ),
            rope=self._rope(),
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_down.bias" in self._tensors,
            eos_token_ids=() if eos is None else (int(eos),),
        )

    def tensors(self) -> Iterator[NamedReader]:
        """Yield every tensor under its Hugging Face name. It is dequantised to float32 when it is
        read.
        """
        query_heads = self._number("attention.head_count")
        heads = {
            "attn_q": query_heads,
            "attn_k": int(self._value(f"{self.family}.attention.head_count_kv", query_heads)),
        }
        for stored_name, tensor in self._tensors.items():
            if stored_name == ROPE_DIVISORS:
                continue
            # GGUF keeps Llama's query and key rows in interleaved order (a pair beside its
            # partner); this decoder rotates halves.
            interleaved = heads.get(stored_name.split(".")[-2]) if self.family == "llama" else None

            def read(
                axis: int,
                start: int,
                end: int,
                tensor: StoredTensor = tensor,
                num_heads: int | None = interleaved,
            ) -> torch.Tensor:
                values = (
                    tensor.values() if num_heads is None else _halves(tensor.values(), num_heads)
                )
                return torch.from_numpy(values).narrow(axis, start, end - start)

            yield self._translated(stored_name), tensor.shape, read

    def _translated(self, stored_name: str) -> str:
        *path, kind = stored_name.split(".")
        if len(path) == 1 and path[0] in _TOP:
            return f"{_TOP[path[0]]}.{kind}"
        if len(path) == 3 and path[0] == "blk" and path[2] in _OF_LAYER:
            return f"model.layers.{path[1]}.{_OF_LAYER[path[2]]}.{kind}"
        raise ModelError(
            f"{self.path}: tensor {stored_name!r} has no place in a {self.family} decoder"
        )

    def _rope(self) -> Rope:
        theta = float(self._value(f"{self.family}.rope.freq_base", 10_000.0))
        kind = self._value(f"{self.family}.rope.scaling.type", "none")
        if kind == "linear":
            return Rope(
                theta, "linear", float(self._value(f"{self.family}.rope.scaling.factor", 1.0))
            )
        if kind != "none":
            raise ModelError(
                f"{self.path}: rope scaling {kind!r} is not read from GGUF; linear and none are"
            )
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


def _halves(
    values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Reorder the rows of every head from pairs (0, 1), (2, 3) ... to all first halves, then all
    second halves.
    """
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
