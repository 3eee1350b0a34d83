"""Which tokens may be drawn at all: top-k, top-p and min-p as one border a row, in plain torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FilterSettings:
    """Rows (int64) that have a filter, and theirs; `widest_k` is 0 when some row keeps too many to select them."""

    rows: torch.Tensor
    top_k: torch.Tensor  # int64, at least 1; the vocabulary where it is off
    top_p: torch.Tensor
    min_p: torch.Tensor
    widest_k: int
    sorts: bool  # some row asks for top-k or top-p, not for min-p alone


def thresholds(logits: torch.Tensor, inverse_temperature: torch.Tensor, filters: FilterSettings) -> torch.Tensor:
    """The least scaled logit of every row of `logits [rows, vocab]` that may still be drawn, `[rows]` float32.

    Scaled: in float32, times the row's `inverse_temperature`; -inf for rows without filters. Top-k first; top-p then
    keeps the fewest of those, most probable first, whose probabilities (of the k kept) reach p, all of them at p = 1;
    min-p keeps what has at least that share of the most probable one's probability. Tokens that tie with the last one
    kept are kept. Where probabilities reach p to within their rounding, the border may lie at the token before.
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
    ordered = scaled.topk(width, dim=-1).values if filters.widest_k else scaled.sort(dim=-1, descending=True).values
    place = torch.arange(width, device=scaled.device)[None, :]
    ordered = ordered.masked_fill(place >= filters.top_k[:, None], float("-inf"))
    probabilities = torch.softmax(ordered, dim=-1)
    # Wide enough that the order of a scan, which may depend on the batch, cannot move the border.
    before = probabilities.double().cumsum(dim=-1) - probabilities
    reached = (before >= filters.top_p[:, None]) & (filters.top_p[:, None] < 1.0)
    kept = ~reached & (ordered > float("-inf"))
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    found = ordered.gather(-1, last).squeeze(-1)
    # A row with min-p alone may stand in a selection that is narrower than all it keeps.
    ranks = (filters.top_k < scaled.shape[-1]) | (filters.top_p < 1.0)
    return torch.where(ranks, torch.maximum(limit, found), limit)
