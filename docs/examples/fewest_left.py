"""Who is next? The request with the fewest tokens left to generate, as far as a server can know.

Use it by its path: `zlab replay TRACE --policy docs/examples/fewest_left.py:FewestLeft`, or vary it like any other
policy: `docs/examples/fewest_left.py:FewestLeft:prefix=none`.

A policy answers one question; `question` says which. `base` names the preset that answers the others (`hybrid` if left
out). The class is made without arguments. The methods are those of `policies.core.policy.Order`; a file that answers
another question has that question's methods. What a request's output will be, nobody knows before it ends: a replay
does, and `policies/predict.py` has an `oracle` that looks, to bound what any guess like this one could gain.
"""

from policies.core.policy import History, Key
from policies.core.request import Request

UNKNOWN = 512.0  # expected output tokens before anything has finished


class FewestLeft:
    """Shortest expected rest first: the mean output of finished requests of its class, at most `max_tokens`."""

    question = "order"
    base = "hybrid"
    lookahead = 4  # up to four behind a head that does not fit may be tried in its stead
    max_skips = 32  # but only so often: then the head blocks the line, so that nobody waits for ever
    fair_by_session = False

    def key(self, request: Request, history: History) -> Key:
        """Tokens expected to be left; equal ones in the order in which they came."""
        mean = history.mean_output(request.cls) or UNKNOWN
        left = mean - request.generated
        if left <= 0:  # it has outlived the guess: lengths are heavy-tailed, expect as much again as there is
            left = float(request.generated)
        if request.max_tokens is not None:
            left = min(left, request.max_tokens - request.generated)
        return (left, float(request.number))
