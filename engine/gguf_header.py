"""The header of a GGUF file (ggml's specification, versions 2 and 3): its values and where its tensors lie.

The `gguf` package's own reader takes seconds over a vocabulary, element by element; here strings in arrays are skipped.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.errors import ModelError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# Value types of the specification, as `struct` knows them; all little-endian.
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: `shape` slowest axis first; `data` mapped, not read."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[Any]]

    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Read and dequantise: float32, writable."""
        found = np.asarray(gguf.quants.dequantize(self.data, self.kind), dtype=np.float32)
        return np.require(found.reshape(self.shape), requirements=("C", "W"))


@dataclass(frozen=True)
class GgufHeader:
    """`values` by key; an array of strings stands there as its length."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """The header of a file, whose tensors stay mapped.

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
        tensors = {name: self._tensor(start + offset, shape, kind) for name, offset, shape, kind in entries}
        return GgufHeader(values, tensors)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, offset, shape and kind."""
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
