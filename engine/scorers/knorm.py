"""Knorm: short keys are attended to most (arXiv 2406.11430)."""

import torch

from zlab.engine.scorers.interface import Scorer, Tokens


class Knorm(Scorer):
    """Keys with the smallest norm."""

    def rate(self, tokens: Tokens) -> torch.Tensor:
        """Return the norm of each key, negated."""
        norms: torch.Tensor = torch.linalg.vector_norm(tokens.keys, dim=-1)
        return -norms
