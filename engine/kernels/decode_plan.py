"""How decode attention is cut: splits of a fixed number of tokens, so that only a request's own length decides.

Every split of every request is an item of work. Items are laid out once a step, before its layers: a kernel then finds
its request by one read, and the longest items come first, so that short ones fill the end of a launch. Plain torch,
which takes the batch at once, has none.
"""

from dataclasses import dataclass

import torch

from engine.kernels.errors import KernelInputError

# Measured on an H200: with enough requests to fill the card few splits are best (fewer partial results), and up to 3%
# apart from 256 to 2048; with few requests the splits are what fills it.
SPLIT_TOKENS = 1024
SPLIT_TOKENS_OF_FEW = 256
FEW_REQUESTS = 32


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of every split of one launch: `[splits, H_q, d]` and `[splits, H_q]`, float32.

    `tickets [B, H_kv]` int32 are drawn by the splits of a request as they finish; 0 between launches.
    """

    split_tokens: int
    partial_output: torch.Tensor
    partial_normaliser: torch.Tensor
    tickets: torch.Tensor


@dataclass(frozen=True)
class DecodePlan:
    """The items of a batch: for all layers of a step, and for the workspace that it was made with.

    `lengths [B]`: cached tokens of each request. `items [most_tokens // split_tokens + B, 4]`, in the order of work:
    request, its first place for partial results, split, length; the split is -1 of a request that there is no room for.
    Every request has an item, also an empty one. Rows from `num_rows [1]` on mean nothing. All int32.
    """

    lengths: torch.Tensor
    num_rows: torch.Tensor
    items: torch.Tensor


def num_splits(max_length: int, max_requests: int, split_tokens: int) -> int:
    """Splits that so many requests can have, each of up to `max_length` cached tokens."""
    return max_requests * -(-max_length // split_tokens)


def decode_workspace_bytes(max_length: int, max_requests: int, num_query_heads: int, head_dim: int) -> int:
    """What `reserve_decode_workspace` takes, but for the tickets."""
    splits = num_splits(max_length, max_requests, choose_split_tokens(max_requests))
    return splits * num_query_heads * (head_dim + 1) * torch.float32.itemsize


def choose_split_tokens(max_requests: int) -> int:
    """A split for a workspace; from its fixed size alone, so that no answer depends on who is in a batch."""
    return SPLIT_TOKENS_OF_FEW if max_requests <= FEW_REQUESTS else SPLIT_TOKENS


def reserve_decode_workspace(
    *,
    max_length: int,
    max_requests: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    split_tokens: int | None = None,
) -> DecodeWorkspace:
    """Room for a batch of `max_requests` of up to `max_length` tokens each, however many of their blocks they share.

    Without `split_tokens` it is `choose_split_tokens(max_requests)`.
    """
    if split_tokens is None:
        split_tokens = choose_split_tokens(max_requests)
    if split_tokens < 1 or split_tokens & (split_tokens - 1):
        raise KernelInputError(f"split_tokens must be a power of two, got {split_tokens}")
    splits = num_splits(max_length, max_requests, split_tokens)
    return DecodeWorkspace(
        split_tokens=split_tokens,
        partial_output=torch.empty(splits, num_query_heads, head_dim, dtype=torch.float32, device=device),
        partial_normaliser=torch.empty(splits, num_query_heads, dtype=torch.float32, device=device),
        tickets=torch.zeros(max_requests, num_kv_heads, dtype=torch.int32, device=device),
    )
