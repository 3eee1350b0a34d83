"""How long will this request's output be?"""

from dataclasses import dataclass
from math import exp
from random import Random
from typing import Protocol

from policies.core.policy import History
from policies.core.request import Request


class Predictor(Protocol):
    """A guess at the number of output tokens."""

    def predict(self, request: Request, history: History) -> float:
        """Output tokens expected of the request."""


def _known(request: Request) -> float:
    """The length a replay forces; without one, the most it may become."""
    forced = request.forced_output_tokens
    return float(request.target_tokens if forced is None else min(forced, request.target_tokens))


@dataclass(frozen=True)
class Oracle:
    """The true length, which only a replay knows: the bound for every predictor."""

    def predict(self, request: Request, history: History) -> float:
        """The forced length."""
        return _known(request)


@dataclass(frozen=True)
class NoisyOracle:
    """The true length times exp(N(0, sigma)), drawn once a request from `seed`."""

    sigma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a negative sigma."""
        if self.sigma < 0:
            raise ValueError(f"sigma must be 0 or more, not {self.sigma}")

    def predict(self, request: Request, history: History) -> float:
        """The forced length with log-normal error."""
        return _known(request) * exp(Random(self.seed * 1_000_003 + request.number).gauss(0.0, self.sigma))


@dataclass(frozen=True)
class ClassMean:
    """Mean output of finished requests of the same class (trace field `cls`); `default` before any has finished."""

    default: float = 512.0

    def predict(self, request: Request, history: History) -> float:
        """The class mean so far."""
        mean = history.mean_output(request.cls)
        return self.default if mean is None else mean
