"""Attention without a paged cache, to run a model's layers on their own."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


class DenseContext:
    """Attention over plain lists of keys and values, a sequence at a time: nothing paged, nothing padded."""

    def __init__(self, num_layers: int, num_sequences: int) -> None:
        self._keys: list[list[list[torch.Tensor]]] = [[[] for _ in range(num_sequences)] for _ in range(num_layers)]
        self._values: list[list[list[torch.Tensor]]] = [[[] for _ in range(num_sequences)] for _ in range(num_layers)]
        self._rows: list[tuple[int, int]] = []

    def begin(self, rows: Sequence[tuple[int, int]]) -> None:
        """The next forward packs, in order, (sequence, number of its next tokens)."""
        self._rows = list(rows)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        outputs = []
        start = 0
        for sequence, count in self._rows:
            part = slice(start, start + count)
            start += count
            self._keys[layer][sequence].append(keys[part])
            self._values[layer][sequence].append(values[part])
            outputs.append(
                causal_attention(
                    queries[part],
                    torch.cat(self._keys[layer][sequence]),
                    torch.cat(self._values[layer][sequence]),
                )
            )
        assert start == queries.shape[0]
        return torch.cat(outputs)


def causal_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`queries [q, H_q, d]` are the last of `keys, values [t, H_kv, d]`."""
    num_queries, num_tokens = queries.shape[0], keys.shape[0]
    mask = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=queries.device).tril(num_tokens - num_queries)
    group = queries.shape[1] // keys.shape[1]
    result = scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.repeat_interleave(group, dim=1).transpose(0, 1),
        values.repeat_interleave(group, dim=1).transpose(0, 1),
        attn_mask=mask,
    )
    return result.transpose(0, 1)
