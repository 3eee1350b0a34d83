"""TOVA: the token that the latest query attends to least is dropped (arXiv 2401.06104).

TOVA drops one token a step, in all heads of a layer at once: attention is the mean over heads. Here
a compression drops a block of tokens at once, by the attention of the latest query alone; tokens
that an earlier query of the block would have saved are not saved.
"""

import torch

from zlab.engine.scorers.interface import Scorer, Tokens


class TOVA(Scorer):
    """Attention of the latest query, mean over all heads of the layer."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return one score for all KV heads of a layer."""
        latest = tokens.attention[:, :, :, -1]
        return latest.mean(dim=(1, 2)).unsqueeze(1).expand(-1, latest.shape[1], -1)
