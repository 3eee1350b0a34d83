"""StreamingLLM: the first tokens and the latest ones (arXiv 2309.17453).

The first four tokens are attention sinks. StreamingLLM gives the kept tokens new positions; here
they keep their own, as under every scorer.
"""

import torch

from zlab.engine.scorers.interface import Scorer, Tokens

NUM_SINKS = 4


class StreamingLLM(Scorer):
    """Four first tokens and a window over the latest ones."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return 1 for sinks and 0 for all others, of which the later ones are kept."""
        scores = torch.zeros_like(tokens.keys[..., 0])
        scores[..., :NUM_SINKS] = 1.0
        return scores
