"""Token ids made from block ids: equal blocks get equal tokens, on any machine and without a table.

Token j of block B is `first + splitmix64(seed, B, j) mod (end - first)`; the last block is cut to the prompt.
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) is whole-number arithmetic modulo 2**64, the same everywhere.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.table import Column

Words = npt.NDArray[np.uint64]
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: Words) -> Words:
    """The output of SplitMix64 for each state."""
    mixed = state + GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class TokensFromBlocks:
    """The column `prompt_ids` of a table whose rows have `prefix_ids`: made when looked at.

    Where the trace names full blocks only, the rest of a prompt is the request's own and made from its id.
    """

    prefix_ids: Column
    prompt_tokens: Column
    request_ids: Column
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
        # Keys of trace blocks and of requests' own rests are told apart by the seed they are mixed with.
        seeds = np.full(len(keys), 2 * self.seed, dtype=np.uint64)
        seeds[-1] += np.uint64(1)
        starts = splitmix64(splitmix64(seeds) ^ keys)
        words = splitmix64(starts[:, None] + np.arange(self.block_size, dtype=np.uint64) * GOLDEN_GAMMA)
        tokens = self.first_token_id + words.ravel() % np.uint64(self.end_token_id - self.first_token_id)
        return tuple(tokens[:num_tokens].tolist())
