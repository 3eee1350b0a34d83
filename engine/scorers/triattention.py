"""TriAttention: attention expected from the mean query at later distances.

Before the rotation the queries of a head lie close around a centre. The attention that a key can
expect at a later distance is then a sum of cosines of that distance, one for each rotated pair,
averaged over distances of 1, 2, 4 ... tokens. Pairs whose queries scatter add the product of the
lengths. TriAttention takes the centres from a calibration; here they are those of the window's
queries. Scores are standardised by query head, and the highest of a group's heads counts.
"""

import torch

from zlab.engine.kernels.torch_backend import standardised
from zlab.engine.scorers.interface import Scorer, Tokens

DISTANCES = tuple(1 << power for power in range(16))


class TriAttention(Scorer):
    """Expected attention, averaged over later distances."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return the highest standardised score of a group's query heads."""
        keys = _as_complex(tokens.plain_keys)[:, :, None]  # [layers, H_kv, 1, S, pairs]
        queries = _as_complex(tokens.plain_queries)  # [layers, w, H_q, pairs]
        grouped = queries.unflatten(2, (keys.shape[1], -1)).movedim(1, 3)
        centre = grouped.mean(dim=3, keepdim=True)  # [layers, H_kv, G, 1, pairs]
        length = grouped.abs().mean(dim=3, keepdim=True)
        # A query `delta` after the latest token meets a key of position p turned back by the rest.
        away = tokens.positions[:, :, None, -1:] - tokens.positions[:, :, None]
        turned = centre.conj() * keys
        expected = torch.zeros_like(turned.real[..., 0])
        for delta in DISTANCES:
            cosines, sines = tokens.rotation_at(away + delta)
            expected += (turned.real * cosines + turned.imag * sines).sum(-1) / len(DISTANCES)
        scattered = ((length - centre.abs()) * keys.abs()).sum(-1)
        return standardised(expected + scattered).amax(dim=2)


def _as_complex(heads: torch.Tensor) -> torch.Tensor:
    """Rotated pairs `[..., d]` (halves side by side) as complex numbers `[..., d / 2]`."""
    first, second = heads.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())
