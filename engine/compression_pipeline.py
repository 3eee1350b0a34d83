"""One compression from end to end: score the tokens, choose which to keep, move them."""

from collections.abc import Sequence

import torch

from engine.kernels.batch import CompressionRequest, check_requests, lay_out
from engine.kernels.choice import find_kernels
from engine.kernels.contract import Kernels
from engine.kernels.errors import KernelInputError
from engine.kernels.workspace import CompressionWorkspace
from engine.scorers import CompressionSettings, ScoringInputs, find_scorer

SELECTION_STEPS = (1024, 4096)  # tokens up to which a selection is one compiled variant; see `triton_select`


def compress(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    requests: Sequence[CompressionRequest],
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
    *,
    kernels: Kernels | None = None,
) -> None:
    """Fill every request's target blocks with the tokens it keeps, of K, V and score history, in all layers.

    `cache_k`, `cache_v [layers, blocks, b, H_kv, d]`, `history [layers, blocks, b, H_kv]` float32, `window_queries
    [layers, slots, w, H_q, d]`. Blocks that are no target are only read. Everything is enqueued on the current stream,
    nothing is allocated on the device and nothing is waited for; a workspace serves one stream. Triton runs on CUDA and
    torch elsewhere unless `kernels` says otherwise. Raises `KernelInputError` before anything is enqueued.
    """
    check_caches(cache_k, cache_v, history, window_queries, settings, workspace)
    check_requests(requests, num_blocks=cache_k.shape[1], num_slots=window_queries.shape[1])
    block_size = cache_k.shape[2]
    for request in requests:
        settings.check_fits(block_size, len(request.target_blocks))
    chosen = kernels if kernels is not None else find_kernels(cache_k.device)
    scorer = find_scorer(settings.scorer)
    for launch in workspace.slices(list(requests)):
        batch = lay_out(launch, block_size, workspace.batch_storage)
        scratch = workspace.scratch(batch.num_requests, batch.max_blocks, batch.max_targets)
        scorer.score(ScoringInputs(cache_k, window_queries, history, batch, scratch, settings), chosen)
        chosen.select(batch, scratch, window=settings.window, sink=settings.sink)
        chosen.compact(cache_k, cache_v, history if scorer.keeps_history else None, batch, scratch)


def warm_up(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
    *,
    num_target_blocks: int,
    kernels: Kernels | None = None,
) -> None:
    """Compile every variant that serving can meet, so that none is compiled later; overwrites the cache's first blocks.

    Sizes that change from call to call are no compile-time constants but for one: how a selection holds its tokens. A
    request of each of the lengths it distinguishes, as far as workspace and cache allow such a length, covers that.
    """
    block_size = cache_k.shape[2]
    most = min(workspace.capacity_blocks, cache_k.shape[1])
    lengths = {num_target_blocks + 1, most, *(tokens // block_size + 1 for tokens in SELECTION_STEPS)}
    for num_blocks in sorted(lengths):
        if num_target_blocks < num_blocks <= most:
            blocks = tuple(range(num_blocks))
            request = CompressionRequest(block_table=blocks, target_blocks=blocks[:num_target_blocks], query_slot=0)
            compress(cache_k, cache_v, history, window_queries, [request], settings, workspace, kernels=kernels)


def check_caches(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    history: torch.Tensor,
    window_queries: torch.Tensor,
    settings: CompressionSettings,
    workspace: CompressionWorkspace,
) -> None:
    """Raise `KernelInputError` where the tensors, the settings and the workspace do not fit together."""
    num_layers, _, block_size, num_kv_heads, head_dim = cache_k.shape
    if cache_v.shape != cache_k.shape or cache_v.dtype != cache_k.dtype:
        raise KernelInputError(
            f"K is {tuple(cache_k.shape)} {cache_k.dtype} but V is {tuple(cache_v.shape)} {cache_v.dtype}"
        )
    if history.shape != cache_k.shape[:4] or history.dtype != torch.float32:
        raise KernelInputError(
            f"the score history must be {tuple(cache_k.shape[:4])} float32, got {tuple(history.shape)} {history.dtype}"
        )
    queries = window_queries.shape
    if queries[0] != num_layers or queries[4] != head_dim or queries[3] % num_kv_heads:
        raise KernelInputError(
            f"window queries {tuple(queries)} do not fit {num_layers} layers, {num_kv_heads} KV heads of {head_dim}"
        )
    if queries[2] != settings.window:
        raise KernelInputError(f"window queries hold {queries[2]} rows a slot but the window is {settings.window}")
    shape = workspace.shape
    expected = (num_layers, num_kv_heads, queries[3] // num_kv_heads, settings.window, block_size)
    reserved = (shape.num_layers, shape.num_kv_heads, shape.group, shape.window, shape.block_size)
    if expected != reserved:
        raise KernelInputError(
            f"the workspace is for (layers, KV heads, group, window, block size) {reserved}, the cache has {expected}"
        )
