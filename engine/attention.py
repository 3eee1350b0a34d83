"""One step's attention over the paged cache: decodes first, then prefill chunks, packed."""

from dataclasses import dataclass

import torch

from engine.cache import PagedCache
from engine.kernels.contract import Kernels
from engine.kernels.decode_plan import DecodeWorkspace
from engine.layers import StoreDestination
from engine.rows import DecodeInputs


@dataclass(frozen=True)
class PrefillInputs:
    """Packed chunks, behind the step's decodes; what stands in a decode's place, or behind the last chunk, is unread.

    `lengths [R]`: cached tokens including the chunk; `query_starts [R + 1]`, in the step; tables `[R, n]`: int32.
    `token_ids`, `positions`, `slot_mapping`, `window_rows [T]` int64, of all tokens of the step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    window_rows: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor


class StepAttention:
    """The `AttentionContext` of one step: tokens of `decode` come first, those of `prefill` after them.

    Rows of `decode` that are padding may lie where `prefill` has tokens: those are then the chunks'.
    """

    def __init__(
        self,
        cache: PagedCache,
        kernels: Kernels,
        workspace: DecodeWorkspace,
        decode: DecodeInputs | None,
        prefill: PrefillInputs | None,
        most_tokens: int,
    ) -> None:
        """`most_tokens`: no less than what all decodes read together."""
        self._cache = cache
        self._kernels = kernels
        self._workspace = workspace
        self._prefill = prefill
        self._num_decodes = len(decode.rows) if decode is not None else 0
        self._decode = None
        if decode is not None:
            self._decode = (decode, kernels.plan_decodes(decode.lengths, workspace, most_tokens))
        self.token_ids = _joined(decode, prefill, "token_ids")
        self.positions = _joined(decode, prefill, "positions")
        self._slot_mapping = _joined(decode, prefill, "slot_mapping")
        self._window_rows = _joined(decode, prefill, "window_rows") if cache.shape.num_slots else None
        self._scale = cache.shape.head_dim**-0.5

    def destination(self, layer: int) -> StoreDestination:
        """Where this layer's rows go."""
        queries = self._cache.window_queries[layer] if self._window_rows is not None else None
        return StoreDestination(
            self._slot_mapping, self._cache.k[layer], self._cache.v[layer], self._window_rows, queries
        )

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store, then attend."""
        to = self.destination(layer)
        self._kernels.store(
            keys, values, to.slot_mapping, to.cache_k, to.cache_v, queries, to.window_rows, to.window_queries
        )
        return self.attend_stored(layer, queries)

    def attend_stored(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend to what the cache holds."""
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        k, v, split = self._cache.k[layer], self._cache.v[layer], self._num_decodes
        if self._decode is not None:
            inputs, plan = self._decode
            self._kernels.decode_attention(
                queries[:split],
                k,
                v,
                inputs.block_tables,
                plan,
                self._scale,
                self._workspace,
                output[:split],
            )
        if self._prefill is not None:
            self._kernels.prefill_attention(  # behind the decodes, whose padding leaves zeros
                queries,
                k,
                v,
                self._prefill.block_tables,
                self._prefill.lengths,
                self._prefill.query_starts,
                self._scale,
                output,
            )
        return output


def _joined(decode: DecodeInputs | None, prefill: PrefillInputs | None, name: str) -> torch.Tensor:
    """What every token of the step has under that name."""
    if prefill is None:
        alone: torch.Tensor = getattr(decode, name)
        return alone
    whole: torch.Tensor = getattr(prefill, name)
    if decode is None:
        return whole
    first = whole[: len(decode.rows)]
    return torch.cat([torch.where(decode.real, getattr(decode, name), first), whole[len(first) :]])
