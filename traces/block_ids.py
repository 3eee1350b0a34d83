"""Ids of prompt blocks: chained ids, changes of the block size, keyed hashes, and tokens from ids.

A *chained* id names a block together with all blocks before it: two prompts with an equal id at
block i are equal through the end of block i. A *content* id names only the block's own tokens.

`Salted` makes a live request safe to store: lengths, times, and which prompts have a common prefix,
but no text. It names a prompt's full blocks by a keyed hash of all tokens up to their end (BLAKE2b,
RFC 7693, eight bytes without the sign bit). The key is random for every recording, is kept in
memory only and is never written. Ids can therefore be compared within the recording, but not with
another recording and not with a guessed text.

`TokensFromBlocks` makes token ids from block ids, so that equal blocks get equal tokens on any
machine. Token j of block B is `first + splitmix64(seed, B, j) mod (end - first)`; the last block is
cut to the prompt. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) uses whole-number arithmetic modulo
2**64.
"""

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zlab.traces.workload import FieldValues, TraceError, TraceRequest, WorkloadMeta


class BlockChains:
    """Gives each pair (parent block, content) its own chained id, numbered from 0 in order of first
    occurrence.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def chain(self, contents: Iterable[object]) -> tuple[int, ...]:
        """Return the chained ids of a prompt, first block first, from the contents of its
        blocks.
        """
        ids = self._ids
        parent = -1
        chained = []
        for content in contents:
            parent = ids.setdefault((parent, content), len(ids))
            chained.append(parent)
        return tuple(chained)

    def chain_tokens(self, token_ids: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """Return the chained ids of a prompt's tokens, cut into blocks. The last block may be
        partial.
        """
        return self.chain(
            token_ids[i : i + block_size] for i in range(0, len(token_ids), block_size)
        )


class PromptBlocks:
    """The prompts of one workload in blocks of another size. One of the two sizes must divide the
    other.

    Ids are chained and can be compared among the requests of this workload only. In larger blocks,
    an id is that of the last smaller block inside. In smaller blocks, each id is split, so that two
    prompts that differ within a block of the trace share no part of it. Token ids, where given, are
    used at any size.
    """

    def __init__(self, meta: WorkloadMeta, block_size: int) -> None:
        if block_size < 1:
            raise TraceError(f"block size is {block_size}, must be at least 1")
        self.block_size = block_size
        self.trace_block_size = meta.block_size
        self.names_last_block = meta.last_block != "full"
        self._chains = BlockChains()
        self._own = count()
        self._by_tokens: bool | None = (
            None  # whether the ids come from tokens; the two kinds cannot be compared
        )

    def full_blocks(self, request: TraceRequest) -> tuple[int, ...] | None:
        """Return one id for each full block of the prompt, or None if it is unknown what the prompt
        shares.
        """
        num_full = request.prompt_tokens // self.block_size
        self._settle_kind(request)
        if request.prompt_ids is not None:
            return self._chains.chain_tokens(
                request.prompt_ids[: num_full * self.block_size], self.block_size
            )
        return None if request.prefix_ids is None else self._resized(request.prefix_ids, num_full)

    def all_blocks(self, request: TraceRequest) -> tuple[int, ...] | None:
        """Return the ids as `full_blocks` does, with an id for the partial last block, too.

        Where the trace does not name a partial block, the block is private to the request: its id
        is new at every call.
        """
        num_full = request.prompt_tokens // self.block_size
        self._settle_kind(request)
        if request.prompt_ids is not None:
            return self._chains.chain_tokens(request.prompt_ids, self.block_size)
        if request.prefix_ids is None:
            return None
        num_all = -(-request.prompt_tokens // self.block_size)
        if self.names_last_block:
            return self._resized(request.prefix_ids, num_all)
        # Even ids are from the trace, odd ones are private.
        named = self._resized(request.prefix_ids, num_full)
        own = tuple(2 * next(self._own) + 1 for _ in range(num_all - num_full))
        return tuple(2 * block for block in named) + own

    def _settle_kind(self, request: TraceRequest) -> None:
        by_tokens = request.prompt_ids is not None
        if not by_tokens and request.prefix_ids is None:
            return
        if self._by_tokens is None:
            self._by_tokens = by_tokens
        if by_tokens != self._by_tokens:
            raise TraceError(
                f"request {request.id!r}: some requests have prompt_ids, others only prefix_ids"
            )

    def _resized(self, ids: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
        size, own_size = self.block_size, self.trace_block_size
        if own_size is None:
            raise TraceError(
                "prefix ids without a block size: the workload's metadata lacks block_size"
            )
        if size % own_size == 0:
            step = size // own_size
            resized = ids if step == 1 else ids[step - 1 :: step]
            # A partial last block ends before its last smaller block, so the prompt's last id names
            # it.
            return resized[:num_blocks] if len(resized) >= num_blocks else (*resized, ids[-1])
        if own_size % size == 0:
            step = own_size // size
            split = [block * step + part for block in ids for part in range(step)]
            return tuple(split[:num_blocks])
        raise TraceError(
            f"blocks of {size} tokens cannot be made from a trace's blocks of {own_size}: "
            f"neither divides"
        )


ID_BYTES = 8
KEY_BYTES = 32


class Hidden(Protocol):
    """Turns a request into the form that may be stored."""

    def request(self, asked: TraceRequest) -> TraceRequest:
        """Return the request as it may be stored."""

    def name(self, name: str) -> str:
        """Return the name of a session as it may be stored."""


class Open:
    """Everything may be stored."""

    def request(self, asked: TraceRequest) -> TraceRequest:
        """Return the request itself."""
        return asked

    def name(self, name: str) -> str:
        """Return the name itself."""
        return name


OPEN = Open()


class Salted:
    """Stores prompts as ids of their full blocks of `block_size` tokens, and sessions as keyed
    hashes.
    """

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        """Set the block size. `key` is for tests only; by default it is random."""
        self.block_size = block_size
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key

    def prefix_ids(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return one chained id for each full block. Equal ids mean equal tokens up to the end of
        the block.
        """
        size, chain = self.block_size, b""
        found = []
        for start in range(0, len(prompt_ids) - size + 1, size):
            block = array("q", prompt_ids[start : start + size]).tobytes()
            chain = blake2b(
                chain + block, digest_size=ID_BYTES, key=self._key, person=b"prefix"
            ).digest()
            found.append(int.from_bytes(chain, "little") >> 1)
        return tuple(found)

    def name(self, name: str) -> str:
        """Return sixteen hexadecimal digits that replace the name."""
        return blake2b(
            name.encode(), digest_size=ID_BYTES, key=self._key, person=b"name"
        ).hexdigest()

    def request(self, asked: TraceRequest) -> TraceRequest:
        """Return the request without token ids. Block ids replace them where the tokens are
        known.
        """
        known = asked.prompt_ids
        return replace(
            asked,
            prompt_ids=None,
            output_ids=None,
            prefix_ids=asked.prefix_ids if known is None else self.prefix_ids(known),
            session=asked.session and self.name(asked.session),
        )


Words = npt.NDArray[np.uint64]
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: Words) -> Words:
    """Return the output of SplitMix64 for each state."""
    mixed = state + GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class TokensFromBlocks:
    """The column `prompt_ids` of a table whose rows have `prefix_ids`. Tokens are computed on
    access.

    Where the trace names full blocks only, the rest of a prompt is private and is made from the
    request's id.
    """

    prefix_ids: FieldValues
    prompt_tokens: FieldValues
    request_ids: FieldValues
    block_size: int
    seed: int
    first_token_id: int
    end_token_id: int

    def __getitem__(self, index: int) -> tuple[int, ...] | None:
        blocks = self.prefix_ids[index]
        if blocks is None:
            return None
        num_tokens = self.prompt_tokens[index]
        own = hashlib.sha256(str(self.request_ids[index]).encode()).digest()
        keys = np.asarray([*blocks, int.from_bytes(own[:8], "little")], dtype=np.uint64)
        # Another seed keeps the tokens of private parts apart from those of the trace's blocks.
        seeds = np.full(len(keys), 2 * self.seed, dtype=np.uint64)
        seeds[-1] += np.uint64(1)
        starts = splitmix64(splitmix64(seeds) ^ keys)
        words = splitmix64(
            starts[:, None] + np.arange(self.block_size, dtype=np.uint64) * GOLDEN_GAMMA
        )
        tokens = self.first_token_id + words.ravel() % np.uint64(
            self.end_token_id - self.first_token_id
        )
        return tuple(tokens[:num_tokens].tolist())
