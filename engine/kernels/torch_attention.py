"""Store and attention in plain torch: the CPU path, and what the Triton kernels must equal."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.decode_plan import DecodePlan, DecodeWorkspace


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    queries: torch.Tensor | None = None,
    window_rows: torch.Tensor | None = None,
    window_queries: torch.Tensor | None = None,
) -> None:
    """See `Kernels.store`."""
    _scatter(keys, slot_mapping, cache_k)
    _scatter(values, slot_mapping, cache_v)
    if queries is not None and window_rows is not None and window_queries is not None:
        _scatter(queries, window_rows, window_queries)


def plan_decodes(lengths: torch.Tensor, workspace: DecodeWorkspace, most_tokens: int) -> DecodePlan:
    """See `Kernels.plan_decodes`; without items: `decode_attention` here reads the lengths, and has room for all."""
    return DecodePlan(lengths, num_rows=lengths.new_zeros(1), items=lengths.new_zeros(0, 4))


def decode_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    workspace: DecodeWorkspace,
    output: torch.Tensor,
) -> None:
    """See `Kernels.decode_attention`; in float32, the whole batch at once, padded to the longest request."""
    num_requests, num_query_heads, head_dim = queries.shape
    num_kv_heads, lengths = cache_k.shape[2], plan.lengths
    longest = int(lengths.max())
    if longest == 0:
        output.zero_()
        return
    num_blocks = -(-longest // cache_k.shape[1])
    tables = block_tables[:, :num_blocks].clamp(min=0).long()
    seen = torch.arange(num_blocks * cache_k.shape[1], device=queries.device)[None, :] < lengths[:, None]
    keys = cache_k[tables].flatten(1, 2).float()
    # Blocks that only pad the table hold another request's values or NaN; zero weight times NaN is NaN.
    values = cache_v[tables].flatten(1, 2).float().masked_fill(~seen[:, :, None, None], 0.0)
    grouped = queries.view(num_requests, num_kv_heads, -1, head_dim).float()
    logits = torch.einsum("rhjd,rthd->rhjt", grouped, keys) * scale
    logits = logits.masked_fill(~seen[:, None, None, :], float("-inf"))
    empty = (lengths == 0)[:, None, None, None]  # padding has no logit at all, so its softmax is NaN
    weights = torch.softmax(logits, dim=-1).masked_fill(empty, 0.0)
    result = torch.einsum("rhjt,rthd->rhjd", weights, values)
    output.copy_(result.reshape(num_requests, num_query_heads, head_dim))


def prefill_attention(
    queries: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    """See `Kernels.prefill_attention`; in float32, one request at a time."""
    starts = query_starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        num_blocks = -(-length // cache_k.shape[1])
        table = block_tables[row, :num_blocks].long()
        keys = cache_k[table].flatten(0, 1)[:length].float().transpose(0, 1)
        values = cache_v[table].flatten(0, 1)[:length].float().transpose(0, 1)
        place = torch.arange(length - (end - begin), length, device=queries.device)
        visible = torch.arange(length, device=queries.device)[None, :] <= place[:, None]
        chunk = queries[begin:end].float().transpose(0, 1)
        result = scaled_dot_product_attention(
            chunk[None], keys[None], values[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        output[begin:end] = result[0].transpose(0, 1).to(output.dtype)


def _scatter(rows: torch.Tensor, mapping: torch.Tensor, cache: torch.Tensor) -> None:
    """`rows [T, H, d]` to row `mapping[t]` of `cache [blocks, b, H, d]`, whatever its strides."""
    stored = mapping >= 0
    place = mapping[stored].long()
    per_block = cache.shape[1]
    cache[place // per_block, place % per_block] = rows[stored].to(cache.dtype)
