"""Random draws that depend on a request's seed and place alone, so that no neighbour in a batch can change them.

A draw from softmax(x) is the argmax of `x - log E` with an exponential E per token (the exponential race, or Gumbel
trick). E comes from a hash of (seed, place in the output, token id): a counter, not a state that draws use up.
"""

import torch

from engine.kernels.hashing import LAYER_STEP, MASK_32, MULTIPLIERS, TOKEN_STEP

SECOND_KEY = 0xC2B2AE35  # sets the second key apart from the first
SMALL = 2.0**-10  # below it, -log(1 - u) is taken by its series, where 1 - u would lose u's last digits
LARGEST = 1.0 - 2.0**-24


def mix(state: torch.Tensor) -> torch.Tensor:
    """`engine.kernels.hashing.mix` on int64 tensors; products wrap in 64 bits, of which the low 32 are kept."""
    state = state & MASK_32
    state = state ^ (state >> 16)
    state = (state * MULTIPLIERS[0]) & MASK_32
    state = state ^ (state >> 15)
    state = (state * MULTIPLIERS[1]) & MASK_32
    return state ^ (state >> 16)


def row_keys(seeds: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys of every row, from its seed (int64, 63 bits) and the place of the token to draw (int64)."""
    low, high = seeds & MASK_32, seeds >> 32
    first = mix(mix(mix(low) + high) + places)
    second = mix(mix(mix(high ^ SECOND_KEY) + low) + places * TOKEN_STEP)
    return first, second


def exponentials(first: torch.Tensor, second: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`[rows, num_tokens]` float32, exponentially distributed: one for every row and token id."""
    token = torch.arange(num_tokens, dtype=torch.int64, device=first.device)[None, :]
    bits = mix(mix(token * LAYER_STEP + first[:, None]) ^ second[:, None])
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=LARGEST)
    return torch.where(uniform < SMALL, uniform + 0.5 * uniform * uniform, -torch.log1p(-uniform))


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    noise: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id (int64) a row of `logits [rows, vocab]`, drawn from softmax(logits * inverse_temperature).

    A row whose `noise` is 0 takes the argmax; else `noise` is 1. Tokens whose scaled logit lies below the row's
    `threshold` cannot be drawn. Equal values: the lowest id. No value reaches the host.
    """
    scaled = logits.float() * inverse_temperature[:, None]
    scores = scaled - noise[:, None] * exponentials(*row_keys(seeds, places), logits.shape[-1]).log()
    if threshold is not None:
        scores = scores.masked_fill(scaled < threshold[:, None], float("-inf"))
    return scores.argmax(dim=-1)


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of every row, the lowest id of equal ones, `[rows]` int64."""
    return logits.argmax(dim=-1)
