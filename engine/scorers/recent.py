"""The latest tokens: equal scores, and of equal scores the later token is kept."""

from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.scorers.interface import Scorer, ScoringInputs


class Recent(Scorer):
    """A window over the latest tokens; with the policy's sink also over the first."""

    def score(self, inputs: ScoringInputs, kernels: KernelBackend) -> None:
        """Give all tokens the same score."""
        inputs.scratch.score.zero_()
