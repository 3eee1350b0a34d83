"""The stages of a layer in Triton: six launches a layer beside the attention, each product cut as was measured best."""

import torch
from torch.nn.functional import linear

from engine import fused_kernels
from engine.layers import AttentionContext, HeadShape, LayerWeights, StoredAttentionContext, StoreDestination
from engine.product_table import ProductTable, table_for
from engine.products import few_rows


class TritonSteps:
    """See `engine.layers.LayerSteps`. The residual is updated in place; deltas may come in splits."""

    def __init__(self, shape: HeadShape, table: torch.Tensor, *, products: ProductTable | None = None) -> None:
        """`products` default to the table of the card that the model is on."""
        self._shape = shape
        self._table = table
        if products is None:
            products = table_for(torch.cuda.get_device_name(table.device)) if table.is_cuda else ProductTable({})
        self._products = products

    def attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerSteps.attention`; a context that lets the layer store is not asked to."""
        normed = fused_kernels.add_norm(delta, residual, layer.attention_norm, self._shape.eps)
        merged = self._product(normed, layer.qkv)
        if isinstance(context, StoredAttentionContext):
            place = context.destination(index)
        else:
            place = self._new_rows(positions, residual.dtype)
        queries = fused_kernels.store_heads(
            merged, layer.qkv_bias, positions, self._table, layer.query_norm, layer.key_norm,
            self._shape, place, residual.dtype,
        )  # fmt: skip
        if isinstance(context, StoredAttentionContext):
            attended = context.attend_stored(index, queries)
        else:
            attended = context.attend(index, queries, place.cache_k.squeeze(1), place.cache_v.squeeze(1))
        return attended.flatten(1), residual

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.project`."""
        if layer.output_bias is not None:
            return linear(attended, layer.output, layer.output_bias)
        return self._product(attended, layer.output)

    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerSteps.feed_forward`."""
        normed = fused_kernels.add_norm(delta, residual, layer.feed_forward_norm, self._shape.eps)
        inner = self._gated(layer, normed)
        if layer.down_bias is not None:
            return linear(inner, layer.down, layer.down_bias), residual
        return self._product(inner, layer.down), residual

    def finish(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.finish`."""
        return fused_kernels.add_norm(delta.contiguous(), residual, weight, self._shape.eps)

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerSteps.head`."""
        logits = self._product(hidden, weight)
        return logits if logits.dim() == 2 else logits.sum(dim=0).to(hidden.dtype)

    def _product(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self._products.find(weight.shape[0], weight.shape[1], gated=False, rows=inputs.shape[0])
        return linear(inputs, weight) if config is None else few_rows(inputs, weight, config)

    def _gated(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        columns, depth = layer.gate_up.shape[0] // 2, layer.gate_up.shape[1]
        if layer.gate_up_bias is None:
            config = self._products.find(columns, depth, gated=True, rows=normed.shape[0])
            if config is not None:
                return few_rows(normed, layer.gate_up, config, gated=True)
        return fused_kernels.gated(linear(normed, layer.gate_up, layer.gate_up_bias), normed.dtype)

    def _new_rows(self, positions: torch.Tensor, dtype: torch.dtype) -> StoreDestination:
        """Rows of their own for keys and values, for a context that stores them itself."""
        num_tokens, device = positions.shape[0], positions.device
        sizes = (num_tokens, 1, self._shape.num_kv_heads, self._shape.head_dim)
        return StoreDestination(
            slot_mapping=torch.arange(num_tokens, dtype=torch.int64, device=device),
            cache_k=torch.empty(sizes, dtype=dtype, device=device),
            cache_v=torch.empty(sizes, dtype=dtype, device=device),
        )
