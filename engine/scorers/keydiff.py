"""KeyDiff: keys that are unlike the mean key (arXiv 2504.15364).

The mean is taken of the keys at length 1, as cached: rotated.
"""

import torch
from torch.nn.functional import cosine_similarity, normalize

from zlab.engine.scorers.interface import Scorer, Tokens


class KeyDiff(Scorer):
    """Keys with the smallest cosine similarity to the mean of the unit keys."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return the similarity of each key to the mean, negated."""
        mean = normalize(tokens.keys, dim=-1).mean(dim=2, keepdim=True)
        return -cosine_similarity(tokens.keys, mean, dim=-1)
