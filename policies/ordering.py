"""Orders of the waiting queue, and predictors of output lengths."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import ClassVar

from typing_extensions import override

from zlab.policies.core.policy import History, Key, Order
from zlab.policies.core.request import Request


class Predictor(ABC):
    """A prediction of the number of output tokens, by which `shortest-output` orders."""

    question: ClassVar[str] = "predictor"

    @abstractmethod
    def predict(self, request: Request, stats: History) -> float:
        """Return the output tokens expected of the request in total."""


def _known(request: Request) -> float:
    """Return the length that a replay forces, or else the largest length the request may reach."""
    forced = request.forced_output_tokens
    return float(request.target_tokens if forced is None else min(forced, request.target_tokens))


@dataclass(frozen=True)
class Oracle(Predictor):
    """Predicts the true length, which only a replay knows: the bound for every predictor."""

    @override
    def predict(self, request: Request, stats: History) -> float:
        return _known(request)


@dataclass(frozen=True)
class NoisyOracle(Predictor):
    """Predicts the true length times exp(N(0, sigma)), drawn once for each request from `seed`."""

    sigma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError on a negative sigma."""
        if self.sigma < 0:
            raise ValueError(f"sigma must be 0 or more, not {self.sigma}")

    @override
    def predict(self, request: Request, stats: History) -> float:
        return _known(request) * exp(
            Random(self.seed * 1_000_003 + request.number).gauss(0.0, self.sigma)
        )


@dataclass(frozen=True)
class ClassMean(Predictor):
    """Predicts the mean output of finished requests of the same class (trace field `cls`);
    `default` before any has finished.
    """

    default: float = 512.0

    @override
    def predict(self, request: Request, stats: History) -> float:
        mean = stats.mean_output(request.cls)
        return self.default if mean is None else mean


@dataclass(frozen=True)
class SkipAhead(Order):
    """Requests behind the head of the queue may be admitted before it.

    Attributes:
        lookahead: Number of requests behind the head that are tried when the head does not fit.
            With 0 the head blocks the queue.
        max_skips: How often a head may be passed over before it blocks the queue.
    """

    lookahead: int = 0
    max_skips: int = 16

    def __post_init__(self) -> None:
        """Raise ValueError on negative bounds."""
        if self.lookahead < 0 or self.max_skips < 0:
            raise ValueError(
                f"lookahead and max_skips must be 0 or more, not {self.lookahead} and "
                f"{self.max_skips}"
            )


@dataclass(frozen=True)
class FirstCome(SkipAhead):
    """Order by submission; a preempted request comes before all later ones."""

    @override
    def key(self, request: Request, stats: History) -> Key:
        return (request.number,)


@dataclass(frozen=True)
class PriorityWithAgeing(SkipAhead):
    """Higher `priority` first; every `arrivals_per_level` later arrivals make up for one level.

    Ageing counts arrivals, not seconds, so decisions stay independent of the clock. A request is
    never overtaken by one that arrives `arrivals_per_level` requests later with a priority one
    level higher.
    """

    arrivals_per_level: int = 64

    def __post_init__(self) -> None:
        """Raise ValueError on an ageing below one arrival per level."""
        super().__post_init__()
        if self.arrivals_per_level < 1:
            raise ValueError(f"arrivals_per_level must be 1 or more, not {self.arrivals_per_level}")

    @override
    def key(self, request: Request, stats: History) -> Key:
        return (request.number - request.priority * self.arrivals_per_level,)


@dataclass(frozen=True)
class StrictPriority(SkipAhead):
    """Order by `priority` alone; of equal priorities the earlier submission is first.

    A request of a later priority can wait for ever.

    Attributes:
        first: The priority value that is served first: the "highest" (as traces mean it) or the
            "lowest" (as vLLM means it).
    """

    first: str = "highest"

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown choice or negative bounds."""
        super().__post_init__()
        if self.first not in ("highest", "lowest"):
            raise ValueError(f"first must be 'highest' or 'lowest', not {self.first!r}")

    @override
    def key(self, request: Request, stats: History) -> Key:
        lowest = self.first == "lowest"
        return (request.priority if lowest else -request.priority, request.number)


@dataclass(frozen=True)
class ShortestPrompt(SkipAhead):
    """Fewest prompt tokens first."""

    @override
    def key(self, request: Request, stats: History) -> Key:
        return (request.prompt_tokens,)


@dataclass(frozen=True)
class ShortestOutput(SkipAhead):
    """Fewest expected output tokens first, predicted when the request joins the queue."""

    predictor: Predictor = field(default_factory=ClassMean)

    @override
    def key(self, request: Request, stats: History) -> Key:
        return (max(self.predictor.predict(request, stats) - request.generated, 0.0),)


@dataclass(frozen=True)
class FairShare(Order):
    """The session with the least service first (virtual counter of prompt and output tokens);
    within a session, by submission.
    """

    @property
    @override
    def max_skips(self) -> int:
        return 0

    @property
    @override
    def fair_by_session(self) -> bool:
        return True

    @override
    def key(self, request: Request, stats: History) -> Key:
        return (request.number,)
