"""Paged decode attention: one launch a layer, over items that are laid out once a step.

The query heads of a KV head are in one program. Of a request that is cut into splits, the program
that finishes last weighs the partial results of all; it does so in split order, so that who was
last does not show.

How decode attention is cut: splits of a fixed number of tokens, so that only a request's own length
decides.

Every split of every request is an item of work. Items are laid out once a step, before its layers:
a kernel then finds its request by one read, and the longest items come first, so that short ones
fill the end of a launch. Plain torch, which takes the batch at once, has none.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zlab.engine.errors import KernelInputError
from zlab.engine.kernels.triton_common import (
    Launch,
    check_cache,
    dot_precision,
    padded,
    power_of_2,
    row_offsets,
)
from zlab.sim import memory


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of every split of one launch: `[splits, H_q, d]` and `[splits, H_q]`,
    float32.

    `tickets [B, H_kv]` int32 are drawn by the splits of a request as they finish; 0 between
    launches.
    """

    split_tokens: int
    partial_output: torch.Tensor
    partial_normaliser: torch.Tensor
    tickets: torch.Tensor


@dataclass(frozen=True)
class DecodePlan:
    """The items of a batch: for all layers of a step, and for the workspace that it was made with.

    `lengths [B]`: cached tokens of each request. `items [most_tokens // split_tokens + B, 4]`, in
    the order of work: request, its first place for partial results, split, length; the split is -1
    of a request that there is no room for. Every request has an item, also an empty one. Rows from
    `num_rows [1]` on mean nothing. All int32.
    """

    lengths: torch.Tensor
    num_rows: torch.Tensor
    items: torch.Tensor


def num_splits(max_length: int, max_requests: int, split_tokens: int) -> int:
    """Splits that so many requests can have, each of up to `max_length` cached tokens."""
    return max_requests * -(-max_length // split_tokens)


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
    """Room for a batch of `max_requests` of up to `max_length` tokens each, however many of their
    blocks they share.

    Without `split_tokens` it is `zlab.sim.memory.split_tokens(max_requests)`.
    """
    if split_tokens is None:
        split_tokens = memory.split_tokens(max_requests)
    if split_tokens < 1 or split_tokens & (split_tokens - 1):
        raise KernelInputError(f"split_tokens must be a power of two, got {split_tokens}")
    splits = num_splits(max_length, max_requests, split_tokens)
    return DecodeWorkspace(
        split_tokens=split_tokens,
        partial_output=torch.empty(
            splits, num_query_heads, head_dim, dtype=torch.float32, device=device
        ),
        partial_normaliser=torch.empty(splits, num_query_heads, dtype=torch.float32, device=device),
        tickets=torch.zeros(max_requests, num_kv_heads, dtype=torch.int32, device=device),
    )


# ruff: noqa: N803 - compile-time constants of a kernel are upper case
# mypy: disable-error-code="untyped-decorator"


LAUNCH = Launch(tile=64, num_warps=4, num_stages=3)
# On an H200 a step of 128 or 256 requests is 1 % shorter, but 7 % longer where such a tile spans
# several blocks.
WIDE_LAUNCH = Launch(tile=128, num_warps=4, num_stages=2)
LOG2_E = 1.4426950408889634
ITEM_WIDTH = tl.constexpr(4)  # request, its first place for partial results, split, length
NO_ROOM = tl.constexpr(-1)  # as a split
# of last splits by length; on an H200 a step of 64 or 128 requests is 2 % shorter than with one
NUM_CLASSES = 4


@triton.jit(do_not_specialize=["num_requests", "most_rows", "most_splits"])
def _plan_kernel(
    lengths: tl.tensor,
    num_rows: tl.tensor,
    items: tl.tensor,
    tickets: tl.tensor,
    num_requests: tl.tensor,
    most_rows: tl.tensor,
    most_splits: tl.tensor,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
) -> None:
    """One program lays out all items: whole splits first, then every request's last, shorter one,
    by class of length.

    Programs start in this order, so the shortest fill the end of a launch.
    """
    request = tl.arange(0, REQUESTS)
    known = request < num_requests
    length = tl.load(lengths + request, mask=known, other=0)
    splits = tl.cdiv(length, SPLIT)
    last = tl.cumsum(splits, axis=0)
    first = last - splits
    rows_until = tl.cumsum(tl.where(known, tl.maximum(splits, 1), 0), axis=0)
    rows_behind = num_requests - 1 - request  # at least: one for each that comes later
    has_room = (last <= most_splits) & (rows_until + rows_behind <= most_rows)
    whole = tl.where(has_room, length // SPLIT, 0)
    rest = (known & ((length % SPLIT > 0) | (length == 0) | (has_room == 0))).to(tl.int32)
    num_whole = tl.sum(whole, axis=0)
    tl.store(num_rows, num_whole + tl.sum(rest, axis=0))
    place = tl.cumsum(whole, axis=0) - whole
    for split in range(0, tl.max(whole, axis=0)):
        row = items + (place + split) * ITEM_WIDTH
        present = split < whole
        tl.store(row, request, mask=present)
        tl.store(row + 1, first, mask=present)
        tl.store(row + 2, tl.zeros_like(request) + split, mask=present)
        tl.store(row + 3, length, mask=present)
    shorter = tl.where(has_room, length % SPLIT, 0) * NUM_CLASSES // SPLIT
    begin = num_whole
    for step in tl.static_range(NUM_CLASSES):
        here = rest * (shorter == NUM_CLASSES - 1 - step).to(tl.int32)
        row = items + (begin + tl.cumsum(here, axis=0) - here) * ITEM_WIDTH
        present = here > 0
        tl.store(row, request, mask=present)
        tl.store(row + 1, first, mask=present)
        tl.store(row + 2, tl.where(has_room, whole, NO_ROOM), mask=present)
        tl.store(row + 3, length, mask=present)
        begin += tl.sum(here, axis=0)
    for head in tl.static_range(NUM_KV_HEADS):
        tl.store(tickets + request * NUM_KV_HEADS + head, tl.zeros_like(request), mask=known)


@triton.jit
def _attend(
    query: tl.tensor,
    keys_of_head: tl.tensor,
    values_of_head: tl.tensor,
    block_table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    PAD_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over the tokens `begin..end`: greatest logit, sum of weights, weighted
    values.
    """
    dim = tl.arange(0, PAD_DIM)
    largest = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PAD_GROUP,), tl.float32)
    result = tl.zeros((PAD_GROUP, PAD_DIM), tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k_offsets = row_offsets(
            block_table, start, token, inside, k_block_stride, k_slot_stride, BLOCK_SIZE, TILE
        )
        v_offsets = row_offsets(
            block_table, start, token, inside, v_block_stride, v_slot_stride, BLOCK_SIZE, TILE
        )
        keys = tl.load(keys_of_head + k_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        logits = tl.where(inside[None, :], logits, float("-inf"))
        # An item has a token, so the first tile has a visible one and `higher` is finite from then
        # on.
        higher = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(values_of_head + v_offsets[:, None] + dim[None, :], mask=mask, other=0.0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
        largest = higher
    return largest, total, result


@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
    queries: tl.tensor,
    cache_k: tl.tensor,
    cache_v: tl.tensor,
    block_tables: tl.tensor,
    num_rows: tl.tensor,
    items: tl.tensor,
    tickets: tl.tensor,
    partial_output: tl.tensor,
    partial_normaliser: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One item for one KV head: `scale` is in units of log 2, as are the normalisers."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if row < tl.load(num_rows):
        request = tl.load(items + row * ITEM_WIDTH).to(tl.int64)
        first_item = tl.load(items + row * ITEM_WIDTH + 1)
        split = tl.load(items + row * ITEM_WIDTH + 2)
        length = tl.load(items + row * ITEM_WIDTH + 3)
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        if (
            split < 0
            # there is no room for this request's splits: an answer from some would look like a
            # right
            # one
        ):
            end = begin
        member = tl.arange(0, PAD_GROUP)
        dim = tl.arange(0, PAD_DIM)
        query_head = head * GROUP + member
        mask_of_heads = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        query = tl.load(
            queries
            + request * query_stride
            + query_head[:, None] * query_head_stride
            + dim[None, :],
            mask=mask_of_heads,
            other=0.0,
        )
        largest, total, result = _attend(
            query, cache_k + head * k_head_stride, cache_v + head * v_head_stride,
            block_tables + request * table_stride, begin, end, scale,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            PAD_GROUP, HEAD_DIM, PAD_DIM, BLOCK_SIZE, TILE, PRECISION,
        )  # fmt: skip
        num_splits = tl.cdiv(length, SPLIT)
        target = (
            output
            + request * output_stride
            + query_head[:, None] * output_head_stride
            + dim[None, :]
        )
        if (num_splits <= 1) | (split < 0):
            alone = (
                result / tl.where(total > 0.0, total, 1.0)[:, None]
            )  # a request of length 0 gets zeros
            if split < 0:
                alone += float("nan")
            tl.store(target, alone.to(output.dtype.element_ty), mask=mask_of_heads)
        else:
            place = (first_item + split).to(tl.int64) * (NUM_KV_HEADS * GROUP) + query_head
            part = partial_output + place[:, None] * HEAD_DIM + dim[None, :]
            tl.store(part, result / total[:, None], mask=mask_of_heads)
            tl.store(partial_normaliser + place, largest + tl.log2(total), mask=member < GROUP)
            # All of this program's values are written before its ticket is drawn; whoever draws the
            # last one sees them.
            tl.debug_barrier()
            ticket = tickets + request * NUM_KV_HEADS + head
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                reduced = _reduced(
                    partial_output,
                    partial_normaliser,
                    first_item,
                    num_splits,
                    query_head,
                    member,
                    dim,
                    mask_of_heads,
                    NUM_KV_HEADS,
                    GROUP,
                    PAD_GROUP,
                    HEAD_DIM,
                    PAD_DIM,
                )
                tl.store(target, reduced.to(output.dtype.element_ty), mask=mask_of_heads)
                tl.store(ticket, 0)  # for the next layer


@triton.jit
def _reduced(
    partial_output: tl.tensor,
    partial_normaliser: tl.tensor,
    first_item: tl.tensor,
    num_splits: tl.tensor,
    query_head: tl.tensor,
    member: tl.tensor,
    dim: tl.tensor,
    mask_of_heads: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
) -> tl.tensor:
    """The splits of one request, weighed by their share of the softmax, in split order."""
    largest = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PAD_GROUP,), tl.float32)
    result = tl.zeros((PAD_GROUP, PAD_DIM), tl.float32)
    for split in range(num_splits):
        place = (first_item + split).to(tl.int64) * (NUM_KV_HEADS * GROUP) + query_head
        # Past the first-level cache: other multiprocessors have written them during this launch.
        normaliser = tl.load(
            partial_normaliser + place, mask=member < GROUP, other=0.0, cache_modifier=".cg"
        )
        part = tl.load(
            partial_output + place[:, None] * HEAD_DIM + dim[None, :],
            mask=mask_of_heads,
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(largest, normaliser)
        shrink = tl.exp2(largest - higher)
        weight = tl.exp2(normaliser - higher)
        result = result * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        largest = higher
    return result / total[:, None]


def choose_launch(cache_k: torch.Tensor, workspace: DecodeWorkspace) -> Launch:
    """What was measured to be best for blocks of this size; for values of 32 bits nothing was."""
    whole_tiles = min(cache_k.shape[-3], workspace.split_tokens) >= WIDE_LAUNCH.tile
    return WIDE_LAUNCH if whole_tiles and cache_k.element_size() <= 2 else LAUNCH


def plan_decodes(lengths: torch.Tensor, workspace: DecodeWorkspace, most_tokens: int) -> DecodePlan:
    """See `Kernels.plan_decodes`."""
    num_requests = len(lengths)
    num_rows = torch.empty(1, dtype=torch.int32, device=lengths.device)
    rows = most_tokens // workspace.split_tokens + num_requests
    items = torch.empty(rows, ITEM_WIDTH.value, dtype=torch.int32, device=lengths.device)
    num_kv_heads = workspace.tickets.shape[1]
    _plan_kernel[(1,)](
        lengths,
        num_rows,
        items,
        workspace.tickets,
        num_requests,
        rows,
        workspace.partial_output.shape[0],
        SPLIT=workspace.split_tokens,
        REQUESTS=power_of_2(num_requests),
        NUM_KV_HEADS=num_kv_heads,
        NUM_CLASSES=NUM_CLASSES,
        num_warps=4,
    )
    return DecodePlan(lengths, num_rows, items)


def decode_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    workspace: DecodeWorkspace,
    output: torch.Tensor,
    *,
    launch: Launch | None = None,
) -> None:
    """See `Kernels.decode_attention`; `launch` overrides what was measured to be best."""
    check_cache(cache_k)
    check_cache(cache_v)
    launch = launch or choose_launch(cache_k, workspace)
    if workspace.split_tokens % launch.tile:
        raise KernelInputError(
            f"a split of {workspace.split_tokens} tokens is no multiple of the tile {launch.tile}"
        )
    _, num_query_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = cache_k.shape
    group = num_query_heads // num_kv_heads
    _split_kernel[(num_kv_heads, len(plan.items))](
        queries, cache_k, cache_v, block_tables, plan.num_rows, plan.items, workspace.tickets,
        workspace.partial_output, workspace.partial_normaliser, output, scale * LOG2_E,
        block_tables.stride(0), *queries.stride()[:2], *output.stride()[:2],
        *cache_k.stride()[:3], *cache_v.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PAD_GROUP=padded(group),
        HEAD_DIM=head_dim, PAD_DIM=padded(head_dim), BLOCK_SIZE=block_size,
        SPLIT=workspace.split_tokens, TILE=launch.tile, PRECISION=dot_precision(cache_k),
        **launch.options(),
    )  # fmt: skip
