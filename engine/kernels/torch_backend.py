"""Scores in plain torch, float32 whatever the cache's dtype; layers and heads at once, one request
at a time.

Store and attention in plain torch: the CPU path, and what the Triton kernels must equal.

Selection and compaction in plain torch.

Integer hashing behind the `random` scorer: the same bits on the host, in torch and in Triton.

The plain-torch set of kernels: runs on any device, and is the oracle on the GPU.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from zlab.engine.kernels.interface import AttentionOptions, DistinctWeights, Segment
from zlab.engine.kernels.triton_decode import DecodePlan, DecodeWorkspace
from zlab.engine.kernels.workspace import CompressionBatch, Scratch


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
    """See `Kernels.plan_decodes`; without items: `decode_attention` here reads the lengths, and has
    room for all.
    """
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
    """See `Kernels.decode_attention`; in float32, the whole batch at once, padded to the longest
    request.
    """
    num_requests, num_query_heads, head_dim = queries.shape
    num_kv_heads, lengths = cache_k.shape[2], plan.lengths
    longest = int(lengths.max())
    if longest == 0:
        output.zero_()
        return
    num_blocks = -(-longest // cache_k.shape[1])
    tables = block_tables[:, :num_blocks].clamp(min=0).long()
    seen = (
        torch.arange(num_blocks * cache_k.shape[1], device=queries.device)[None, :]
        < lengths[:, None]
    )
    keys = cache_k[tables].flatten(1, 2).float()
    # Blocks that only pad the table hold another request's values or NaN; zero weight times NaN is
    # NaN.
    values = cache_v[tables].flatten(1, 2).float().masked_fill(~seen[:, :, None, None], 0.0)
    grouped = queries.view(num_requests, num_kv_heads, -1, head_dim).float()
    logits = torch.einsum("rhjd,rthd->rhjt", grouped, keys) * scale
    logits = logits.masked_fill(~seen[:, None, None, :], float("-inf"))
    empty = (lengths == 0)[
        :, None, None, None
    ]  # padding has no logit at all, so its softmax is NaN
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


def select(batch: CompressionBatch, scratch: Scratch, *, window: int, sink: int) -> None:
    """See `Kernels.select`."""
    for row, request in enumerate(batch.requests):
        num_tokens = len(request.block_table) * batch.block_size
        num_keep = len(request.target_blocks) * batch.block_size
        free_end = num_tokens - window
        score = scratch.score[:, row, :, sink:free_end]
        score = score.masked_fill(score.isnan(), float("-inf"))
        # A stable sort keeps equal scores in their order, so turning the tokens round first puts
        # the later one ahead.
        order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        chosen = free_end - 1 - order[:, :, : num_keep - sink - window]
        index = scratch.keep_index[:, row, :, :num_keep]
        index[:, :, :sink] = torch.arange(sink, device=index.device)
        index[:, :, sink : num_keep - window] = chosen.sort(dim=-1).values.int()
        index[:, :, num_keep - window :] = torch.arange(free_end, num_tokens, device=index.device)


def compact(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
) -> None:
    """See `Kernels.compact`; the gather makes a copy, so the scatter may overwrite what was
    read.
    """
    num_layers, _, block_size, num_kv_heads, _ = cache_k.shape
    device = cache_k.device
    layers = torch.arange(num_layers, device=device)[:, None, None]
    heads = torch.arange(num_kv_heads, device=device)[None, :, None]
    for row, request in enumerate(batch.requests):
        num_keep = len(request.target_blocks) * block_size
        source = scratch.keep_index[:, row, :, :num_keep].long()
        target = torch.arange(num_keep, device=device)
        source_block = torch.tensor(request.block_table, device=device)[source // block_size]
        target_block = torch.tensor(request.target_blocks, device=device)[target // block_size]
        from_place = (layers, source_block, source % block_size, heads)
        to_place = (layers, target_block, target % block_size, heads)
        for cache in (cache_k, cache_v):
            cache[to_place] = cache[from_place]
        if history is not None:
            history[to_place] = scratch.global_score[:, row].gather(-1, source)


LAYER_STEP = 0x9E3779B9
TOKEN_STEP = 0x85EBCA6B
MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (
    0x7FEB352D,
    0x846CA68B,
)  # of a 32-bit finaliser with low bias (C. Wellons' search, `lowbias32`)


def mix(state: int) -> int:
    """A 32-bit finaliser: every bit of the input reaches every bit of the output."""
    state &= MASK_32
    state ^= state >> 16
    state = state * MULTIPLIERS[0] & MASK_32
    state ^= state >> 15
    state = state * MULTIPLIERS[1] & MASK_32
    return state ^ state >> 16


def seed_of(*parts: int) -> int:
    """One signed 32-bit seed from several numbers, in order."""
    state = 0
    for part in parts:
        state = mix(mix(state) + part)
    return state - (1 << 32) if state >= 1 << 31 else state


SMALLEST_NORM = 1e-6


POSITION_BITS = 17  # of a packed word: 131,072 positions; further ones begin again at 0
POSITION_MASK = (1 << POSITION_BITS) - 1
SMALLEST_SPREAD = 0.01  # of a length's mean: what varies less is taken for rounding
FEWEST_LATEST = 64  # tokens in which a copy is looked for where a block has fewer
SMALLEST_CENTRED = 1e-3  # of a unit key less the mean key: what is shorter is taken for rounding


def attention_score(
    cache_k: torch.Tensor,
    window_queries: torch.Tensor,
    batch: CompressionBatch,
    scratch: Scratch,
    history: torch.Tensor | None,
    options: AttentionOptions,
) -> None:
    """See `KernelBackend.attention_score`."""
    for row, request in enumerate(batch.requests):
        keys = gather_cache_order(cache_k, request.block_table).float()
        queries = window_queries[:, request.query_slot].float()
        score = window_attention(queries, keys, mean_heads=options.mean_heads)
        carried = request.num_carried(batch.block_size) if history is not None else 0
        prior = score[:, :, :0]
        positions = score[:, :, :0].long()
        if history is not None and carried:
            prior = gather_cache_order(history, request.block_table)[:, :, :carried]
            if options.with_positions:
                positions, prior = unpack(prior)
            score[:, :, :carried] = torch.maximum(score[:, :, :carried], options.decay * prior)
        if options.with_positions:
            score = pack(continued(positions, score.shape[2]), score)
        scratch.global_score[:, row, :, : score.shape[2]] = score
    if options.lightning_threshold is not None:
        lightning_redundancy(cache_k, batch, scratch, threshold=options.lightning_threshold)


def pack(positions: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Position (17 bits) and a score of at least 0 (bfloat16 without its sign) in one float32 word.

    The word is to be moved, not to be computed with.
    """
    bits = score.contiguous().view(torch.int32).long() + (1 << 15)  # to the nearest bfloat16
    word = (bits >> 16 << POSITION_BITS) | (positions & POSITION_MASK)
    return word.to(torch.int32).view(torch.float32)


def unpack(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack` was given: positions (int64) and scores (float32, rounded)."""
    bits = word.contiguous().view(torch.int32).long()
    score = (bits >> POSITION_BITS & 0x7FFF) << 16
    return bits & POSITION_MASK, score.to(torch.int32).view(torch.float32)


def continued(positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`positions [..., carried]` of carried tokens, and those of the tokens behind them.

    The last carried token was the latest one at the last compression, so the new ones follow it.
    """
    carried = positions.shape[-1]
    new = torch.arange(num_tokens - carried, device=positions.device)
    if carried:
        return torch.cat((positions, positions[..., -1:] + 1 + new), dim=-1)
    return new.expand(*positions.shape[:-1], num_tokens)


def unrotated(
    keys: torch.Tensor, positions: torch.Tensor, rotation: torch.Tensor | None
) -> torch.Tensor:
    """`keys [..., S, d]` with the rotation of their positions undone; as they are without a table.

    `rotation [positions, d]`: cosines and sines of `zlab.engine.model.decoder.rotation_table`.
    """
    if rotation is None:
        return keys
    cosines, sines = rotation[positions.clamp(max=len(rotation) - 1)].float().chunk(2, dim=-1)
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cosines + second * sines, second * cosines - first * sines), dim=-1)


def standardised(values: torch.Tensor, smallest_spread: float = 0.0) -> torch.Tensor:
    """`values [..., S]` in standard deviations from their mean over the last axis.

    A deviation below `smallest_spread` times the mean counts as that.
    """
    mean = values.mean(-1, keepdim=True)
    spread = (values - mean).square().mean(-1, keepdim=True).sqrt()
    return (values - mean) / spread.maximum(smallest_spread * mean.abs()).clamp(min=1e-6)


def num_compared(block_size: int) -> int:
    """Return the number of latest tokens in which `KernelBackend.distinct_score` finds copies."""
    return max(FEWEST_LATEST, block_size)


def latest_copies(unit: torch.Tensor, num_latest: int, dtype: torch.dtype) -> torch.Tensor:
    """Return how much each token has a copy among later tokens of the last `num_latest`.

    Args:
        unit: keys of length 1, `[..., S, d]`.
        num_latest: tokens at the end that all others are compared with.
        dtype: the keys less their mean are rounded to it before they are multiplied.

    Returns:
        The highest cosine with a later one of these tokens, of keys less the mean key, `[..., S]`;
        0 for the last token.
    """
    centred = unit - unit.mean(dim=-2, keepdim=True)
    lengths = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    centred = (centred / lengths.clamp(min=SMALLEST_CENTRED)).to(dtype).float()
    latest = centred[..., -num_latest:, :]
    similarity = centred @ latest.transpose(-1, -2)
    places = torch.arange(centred.shape[-2], device=unit.device)
    later = places[-num_latest:] > places[:, None]
    copies: torch.Tensor = similarity.masked_fill(~later, float("-inf")).amax(dim=-1)
    copies[..., -1] = 0.0
    return copies


def distinct_score(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    rotation: torch.Tensor | None,
    batch: CompressionBatch,
    scratch: Scratch,
    weights: DistinctWeights,
) -> None:
    """See `KernelBackend.distinct_score`."""
    for row, request in enumerate(batch.requests):
        keys = gather_cache_order(cache_k, request.block_table).float()
        values = gather_cache_order(cache_v, request.block_table).float()
        num_tokens = keys.shape[2]
        positions, score = unpack(scratch.global_score[:, row, :, :num_tokens])
        if not request.compressed_before:
            score = pool(score, weights.pool_size)
        key_norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1)
        value_norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1)
        unit = unrotated(keys, positions, rotation) / key_norms.clamp(min=SMALLEST_NORM)[..., None]
        likeness = (unit * unit.sum(dim=2, keepdim=True)).sum(dim=-1)
        copies = latest_copies(unit, num_compared(batch.block_size), cache_k.dtype)
        common = (
            standardised(likeness)
            + weights.copy_weight * standardised(copies)
            - weights.key_weight * standardised(key_norms, SMALLEST_SPREAD)
            - weights.value_weight * standardised(value_norms, SMALLEST_SPREAD)
        )
        redundant = torch.softmax(weights.sharpness * standardised(common), dim=-1)
        share = weights.attention_weight
        scratch.score[:, row, :, :num_tokens] = share * score - (1.0 - share) * redundant


def lightning_redundancy(
    cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float
) -> None:
    """See `Kernels.lightning_redundancy`."""
    for row, request in enumerate(batch.requests):
        unit = _unit_keys(cache_k, request.block_table)
        logits = redundancy_logits(
            unit.view(*unit.shape[:2], -1, batch.block_size, unit.shape[3]), threshold
        )
        scratch.redundancy_logits[:, row, :, : unit.shape[2]] = logits.flatten(2)


def full_redundancy(
    cache_k: torch.Tensor, batch: CompressionBatch, scratch: Scratch, *, threshold: float
) -> None:
    """See `Kernels.full_redundancy`; one layer at a time, the S x S matrix is large."""
    for row, request in enumerate(batch.requests):
        unit = _unit_keys(cache_k, request.block_table)
        for layer in range(unit.shape[0]):
            scratch.redundancy_logits[layer, row, :, : unit.shape[2]] = redundancy_logits(
                unit[layer], threshold
            )


def combine(
    batch: CompressionBatch,
    scratch: Scratch,
    *,
    pool_size: int,
    attention_weight: float,
    temperature: float,
    segment: Segment | None,
) -> None:
    """See `Kernels.combine`."""
    for row, request in enumerate(batch.requests):
        num_tokens = len(request.block_table) * batch.block_size
        score = scratch.global_score[:, row, :, :num_tokens]
        if not request.compressed_before:
            score = pool(score, pool_size)
        if segment is not None:
            divisor = temperature * (batch.block_size if segment == "block" else num_tokens)
            redundant = torch.softmax(
                scratch.redundancy_logits[:, row, :, :num_tokens] / divisor, dim=-1
            )
            score = attention_weight * score - (1.0 - attention_weight) * redundant
        scratch.score[:, row, :, :num_tokens] = score


def random_score(batch: CompressionBatch, scratch: Scratch) -> None:
    """See `Kernels.random_score`."""
    num_layers, _, num_kv_heads, num_tokens = scratch.score.shape
    device = scratch.score.device
    heads = torch.arange(num_layers * num_kv_heads, device=device).view(
        num_layers, 1, num_kv_heads, 1
    )
    seeds = batch.seeds.long().view(1, -1, 1, 1)
    state = _mix(seeds + _mix(heads * LAYER_STEP))
    bits = _mix(state + torch.arange(num_tokens, device=device) * TOKEN_STEP)
    scratch.score.copy_((bits >> 8).float() * 2.0**-24)


def gather_cache_order(cache: torch.Tensor, block_table: tuple[int, ...]) -> torch.Tensor:
    """`cache [layers, blocks, b, H, ...]` -> a copy `[layers, H, S, ...]` in cache order."""
    table = torch.tensor(block_table, device=cache.device)
    return cache[:, table].flatten(1, 2).transpose(1, 2)


def window_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Softmax of the window's queries over all tokens, each seeing those up to itself.

    `queries [layers, w, H_q, d]`, `keys [layers, H_kv, S, d]`, float32; returns `[layers, H_kv, G,
    w, S]`.
    """
    window, num_query_heads, head_dim = queries.shape[1:]
    num_kv_heads, num_tokens = keys.shape[1:3]
    grouped = queries.reshape(-1, window, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    logits = torch.einsum("lihjd,lhtd->lhjit", grouped, keys) / head_dim**0.5
    place = torch.arange(num_tokens - window, num_tokens, device=keys.device)
    hidden = torch.arange(num_tokens, device=keys.device)[None, :] > place[:, None]
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)


def window_attention(
    queries: torch.Tensor, keys: torch.Tensor, *, mean_heads: bool = False
) -> torch.Tensor:
    """A `[layers, H_kv, S]` of what `window_weights` takes; see `KernelBackend.attention_score`."""
    weights = window_weights(queries, keys)
    return (weights.mean(dim=2) if mean_heads else weights.amax(dim=2)).mean(dim=2)


def pool(score: torch.Tensor, size: int) -> torch.Tensor:
    """Running maximum over the last axis, clipped at its ends; `score [layers, H_kv, S]`."""
    pooled: torch.Tensor = torch.nn.functional.max_pool1d(score, size, stride=1, padding=size // 2)
    return pooled


def redundancy_logits(unit_keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Row sums `[..., n]` of the similarities of `unit_keys [..., n, d]` after the last row per
    column is spared.
    """
    similarity = unit_keys @ unit_keys.transpose(-1, -2)
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    rows = torch.arange(similarity.shape[-1], device=similarity.device)[:, None]
    spared = torch.where(similarity > threshold, rows, -1).amax(dim=-2, keepdim=True)
    return similarity.masked_fill(rows == spared, 0.0).sum(dim=-1)


def _unit_keys(cache_k: torch.Tensor, block_table: tuple[int, ...]) -> torch.Tensor:
    keys = gather_cache_order(cache_k, block_table).float()
    norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    return keys / norms.clamp(min=SMALLEST_NORM)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """`hashing.mix` on int64 tensors that hold 32-bit values; products wrap in 64 bits and keep
    their low half.
    """
    state = state & MASK_32
    state = state ^ state >> 16
    state = state * MULTIPLIERS[0] & MASK_32
    state = state ^ state >> 15
    state = state * MULTIPLIERS[1] & MASK_32
    return state ^ state >> 16
