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
    """Packed chunks. `lengths [R]`: cached tokens including the chunk; `query_starts [R + 1]`; tables `[R, n]`: int32.

    `token_ids`, `positions`, `slot_mapping`, `window_rows [T]` int64.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    window_rows: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor


class StepAttention:
    """The `AttentionContext` of one step: tokens of `decode` come first, those of `prefill` after them."""

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
        parts = [part for part in (decode, prefill) if part is not None]
        self.token_ids = torch.cat([part.token_ids for part in parts])
        self.positions = torch.cat([part.positions for part in parts])
        self._slot_mapping = torch.cat([part.slot_mapping for part in parts])
        self._window_rows = torch.cat([part.window_rows for part in parts]) if cache.shape.num_slots else None
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
            self._kernels.prefill_attention(
                queries[split:],
                k,
                v,
                self._prefill.block_tables,
                self._prefill.lengths,
                self._prefill.query_starts,
                self._scale,
                output[split:],
            )
        return output
