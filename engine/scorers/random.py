"""Random tokens: the control that every other scorer has to beat."""

from zlab.engine.kernels.interface import KernelBackend
from zlab.engine.scorers.interface import Scorer, ScoringInputs


class Random(Scorer):
    """Uniform scores from the request's seed, the layer, the KV head and the cache position."""

    def score(self, inputs: ScoringInputs, kernels: KernelBackend) -> None:
        """Draw the scores."""
        kernels.random_score(inputs.batch, inputs.scratch)
