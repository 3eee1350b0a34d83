"""What may be written down of a live request: lengths, times, and which prompts begin alike, but no text.

A prompt's full blocks are named by a keyed hash of everything up to their end (BLAKE2b, RFC 7693, eight bytes, the sign
bit left out). The key is drawn anew for every recording, lives in memory only and is never written: ids can be compared
within the recording, and neither with another recording nor with a text that somebody has in mind.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from traces.workload import TraceRequest

ID_BYTES = 8
KEY_BYTES = 32


class Hidden(Protocol):
    """Turns what was asked into what is written."""

    def request(self, asked: TraceRequest) -> TraceRequest:
        """The request as it may be written down."""

    def name(self, name: str) -> str:
        """The name of a session as it may be written down."""


class Open:
    """Everything may be written down."""

    def request(self, asked: TraceRequest) -> TraceRequest:
        """The request itself."""
        return asked

    def name(self, name: str) -> str:
        """The name itself."""
        return name


OPEN = Open()


class Salted:
    """Prompts as ids of their full blocks of `block_size` tokens, sessions as keyed hashes."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        """`key` only for tests; by default nobody knows it."""
        self.block_size = block_size
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key

    def prefix_ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """One chained id a full block: equal ids, equal tokens up to the end of that block."""
        size, chain = self.block_size, b""
        found = []
        for start in range(0, len(prompt_ids) - size + 1, size):
            block = array("q", prompt_ids[start : start + size]).tobytes()
            chain = blake2b(chain + block, digest_size=ID_BYTES, key=self._key, person=b"prefix").digest()
            found.append(int.from_bytes(chain, "little") >> 1)
        return tuple(found)

    def name(self, name: str) -> str:
        """Sixteen hexadecimal digits in place of a name."""
        return blake2b(name.encode(), digest_size=ID_BYTES, key=self._key, person=b"name").hexdigest()

    def request(self, asked: TraceRequest) -> TraceRequest:
        """The request without token ids, with block ids in their place where its tokens are known."""
        known = asked.prompt_ids
        return replace(
            asked,
            prompt_ids=None,
            output_ids=None,
            prefix_ids=asked.prefix_ids if known is None else self.prefix_ids(known),
            session=asked.session and self.name(asked.session),
        )
