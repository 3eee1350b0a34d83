"""Sampling in plain torch: random draws, and the filters top-k, top-p and min-p.

A sample from softmax(x) is the argmax of `x - log E` with an exponential variable E for each token
(the exponential race, equivalent to the Gumbel-max trick). E comes from a hash of the request's
seed, the place in the output and the token id. It is a counter, not a state, so no other request of
the batch changes it. The filters become one threshold for each row.
"""

from dataclasses import dataclass

import torch

from zlab.engine.kernels.torch_backend import LAYER_STEP, MASK_32, MULTIPLIERS, TOKEN_STEP

SECOND_KEY = 0xC2B2AE35  # makes the second key differ from the first
SMALL = (
    2.0**-10
)  # below it, -log(1 - u) is computed by its series, because 1 - u would lose the last digits of u
LARGEST = 1.0 - 2.0**-24
NOT_FINITE = -1  # stands for a token where the logits are not finite


def mix(state: torch.Tensor) -> torch.Tensor:
    """Compute `zlab.engine.kernels.torch_backend.mix` on int64 tensors. Products wrap in 64 bits;
    the low 32 are kept.
    """
    state = state & MASK_32
    state = state ^ (state >> 16)
    state = (state * MULTIPLIERS[0]) & MASK_32
    state = state ^ (state >> 15)
    state = (state * MULTIPLIERS[1]) & MASK_32
    return state ^ (state >> 16)


def row_keys(seeds: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two 32-bit keys of every row, from its seed (int64, 63 bits) and the place of its next
    token (int64).
    """
    low, high = seeds & MASK_32, seeds >> 32
    first = mix(mix(mix(low) + high) + places)
    second = mix(mix(mix(high ^ SECOND_KEY) + low) + places * TOKEN_STEP)
    return first, second


def exponentials(first: torch.Tensor, second: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return exponentially distributed numbers `[rows, num_tokens]` float32, one for every row and
    token id.
    """
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
    """Sample one token id (int64) for each row from softmax(logits * inverse_temperature). No value
    reaches the host.

    Of equal values the lowest id wins.

    Args:
        logits: `[rows, vocab]`.
        inverse_temperature: `[rows]` float32.
        noise: 0 for rows that take the argmax, else 1, `[rows]` float32.
        seeds: `[rows]` int64.
        places: places in the outputs, `[rows]` int64.
        threshold: smallest scaled logits that may be sampled, `[rows]` float32.
    """
    scaled = logits.float() * inverse_temperature[:, None]
    scores = (
        scaled - noise[:, None] * exponentials(*row_keys(seeds, places), logits.shape[-1]).log()
    )
    if threshold is not None:
        scores = scores.masked_fill(scaled < threshold[:, None], float("-inf"))
    return scores.argmax(dim=-1)


def most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of every row, the lowest id of equal ones, `[rows]` int64."""
    return logits.argmax(dim=-1)


def checked_most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return `most_probable`, with `NOT_FINITE` for a row with a logit that is NaN or infinite."""
    total = logits.sum(dim=-1, dtype=torch.float32)  # not finite as soon as one logit is not
    return logits.argmax(dim=-1).masked_fill(~total.isfinite(), NOT_FINITE)


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens that a mask does not allow to -inf, in place.

    Args:
        logits: `[all rows, vocab]` float32.
        rows: the rows to mask, `[rows]` int64.
        masks: `[rows, words]` int32; bit `t % 32` of word `t // 32` allows token `t`.
    """
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> places) & 1
    excluded = bits.flatten(1)[:, : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill(excluded, float("-inf"))


@dataclass(frozen=True)
class FilterSettings:
    """Rows (int64) that have a filter, and their settings. `widest_k` is 0 when a row keeps too
    many tokens for a selection.
    """

    rows: torch.Tensor
    top_k: torch.Tensor  # int64, at least 1; the vocabulary size where top-k is off
    top_p: torch.Tensor
    min_p: torch.Tensor
    widest_k: int
    sorts: bool  # whether a row uses top-k or top-p


def thresholds(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, filters: FilterSettings
) -> torch.Tensor:
    """Return the smallest scaled logit of each row that may be sampled, `[rows]` float32; -inf for
    rows without filters.

    Scaled logits are float32 logits times the row's inverse temperature. Top-k is applied first.
    Top-p then keeps the fewest of the k tokens, most probable first, whose probabilities (among the
    k) reach p; at p = 1 it keeps all. Min-p keeps tokens with at least that share of the highest
    probability. Tokens that tie with the last kept one are kept. Where probabilities reach p up to
    rounding, the threshold may be one token higher.

    Args:
        logits: `[rows, vocab]`.
        inverse_temperature: `[rows]` float32.
        filters: the filters of the rows.
    """
    scaled = logits[filters.rows].float() * inverse_temperature[filters.rows, None]
    everywhere = torch.full((logits.shape[0],), float("-inf"), device=logits.device)
    return everywhere.index_copy_(0, filters.rows, _borders(scaled, filters))


def _borders(scaled: torch.Tensor, filters: FilterSettings) -> torch.Tensor:
    highest = scaled.amax(dim=-1)
    limit = torch.where(filters.min_p > 0, highest + filters.min_p.log(), float("-inf"))
    if not filters.sorts:
        return limit
    width = filters.widest_k or scaled.shape[-1]
    ordered = (
        scaled.topk(width, dim=-1).values
        if filters.widest_k
        else scaled.sort(dim=-1, descending=True).values
    )
    place = torch.arange(width, device=scaled.device)[None, :]
    ordered = ordered.masked_fill(place >= filters.top_k[:, None], float("-inf"))
    probabilities = torch.softmax(ordered, dim=-1)
    # float64, so that the order of a scan, which may depend on the batch, cannot move the
    # threshold.
    before = probabilities.double().cumsum(dim=-1) - probabilities
    reached = (before >= filters.top_p[:, None]) & (filters.top_p[:, None] < 1.0)
    kept = ~reached & (ordered > float("-inf"))
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    found = ordered.gather(-1, last).squeeze(-1)
    # A row with min-p alone may be in a selection that is narrower than what it keeps.
    ranks = (filters.top_k < scaled.shape[-1]) | (filters.top_p < 1.0)
    return torch.where(ranks, torch.maximum(limit, found), limit)
