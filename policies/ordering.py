"""Who is next in the waiting line?"""

from dataclasses import dataclass, field

from policies.core.policy import History, Key
from policies.core.request import Request
from policies.predict import ClassMean, Predictor


@dataclass(frozen=True)
class SkipAhead:
    """Bounded skip-ahead: what may be tried when the head of the line does not fit.

    Attributes:
        lookahead: requests behind the head that are tried in its stead; 0: the head blocks the line.
        max_skips: how often one head may be passed over before it blocks the line after all.
    """

    lookahead: int = 0
    max_skips: int = 16

    def __post_init__(self) -> None:
        """Raise ValueError on negative bounds."""
        if self.lookahead < 0 or self.max_skips < 0:
            raise ValueError(f"lookahead and max_skips must be 0 or more, not {self.lookahead} and {self.max_skips}")

    @property
    def fair_by_session(self) -> bool:
        """One line for all."""
        return False


@dataclass(frozen=True)
class FirstCome(SkipAhead):
    """By submission; a preempted request stands before everyone who came after it."""

    def key(self, request: Request, history: History) -> Key:
        """Submission number."""
        return (request.number,)


@dataclass(frozen=True)
class PriorityWithAgeing(SkipAhead):
    """Higher `priority` first; every `arrivals_per_level` later arrivals make up for one level.

    Ageing by arrivals, not by seconds, keeps decisions free of the clock: a request that waits is overtaken by fewer
    and fewer, and never by one that comes `arrivals_per_level` requests later and stands one level higher.
    """

    arrivals_per_level: int = 64

    def __post_init__(self) -> None:
        """Raise ValueError on an ageing below one arrival a level."""
        super().__post_init__()
        if self.arrivals_per_level < 1:
            raise ValueError(f"arrivals_per_level must be 1 or more, not {self.arrivals_per_level}")

    def key(self, request: Request, history: History) -> Key:
        """Submission number, less a bonus a level."""
        return (request.number - request.priority * self.arrivals_per_level,)


@dataclass(frozen=True)
class ShortestPrompt(SkipAhead):
    """Fewest prompt tokens first."""

    def key(self, request: Request, history: History) -> Key:
        """Prompt tokens."""
        return (request.prompt_tokens,)


@dataclass(frozen=True)
class ShortestOutput(SkipAhead):
    """Fewest output tokens still expected first, as the predictor has it when the request joins the line."""

    predictor: Predictor = field(default_factory=ClassMean)

    def key(self, request: Request, history: History) -> Key:
        """Predicted output still to come."""
        return (max(self.predictor.predict(request, history) - request.generated, 0.0),)


@dataclass(frozen=True)
class FairShare:
    """The session served least so far first (virtual counter of prompt and output tokens); within one, first come."""

    @property
    def lookahead(self) -> int:
        """The head blocks the line: passing it over would take back what fairness gave."""
        return 0

    @property
    def max_skips(self) -> int:
        """Never."""
        return 0

    @property
    def fair_by_session(self) -> bool:
        """One line a session."""
        return True

    def key(self, request: Request, history: History) -> Key:
        """Submission number."""
        return (request.number,)
