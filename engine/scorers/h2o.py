"""H2O: heavy hitters, the tokens with the largest sum of attention so far (arXiv 2306.14048).

H2O sums the attention of every query since a token was written. The queries of earlier steps are
not kept, so here the sum is over the queries of every window since: a compression adds the
attention of its own window. H2O keeps half of its budget for the latest tokens; a policy's `recent`
does that.
"""

import torch

from zlab.engine.scorers.interface import Scorer, Tokens


class H2O(Scorer):
    """Attention summed over all windows so far, mean over a group's query heads."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return the sum, and remember it."""
        total = tokens.attention.mean(dim=2).sum(dim=2)
        total[..., : tokens.num_carried] += tokens.history
        tokens.remember(total)
        return total
