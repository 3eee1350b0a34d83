"""Who is next? The request with the fewest tokens left to generate, as far as anybody can know.

Use it by its path: `zlab replay TRACE --policy docs/examples/fewest_left.py:FewestLeft`, or vary it like any other
policy: `docs/examples/fewest_left.py:FewestLeft:prefix=none`.

A policy answers one question; `question` says which. `base` names the preset that answers the others (`hybrid` if left
out). The class is made without arguments. The methods are those of `policies.core.policy.Order`; a file that answers
another question has that question's methods.
"""

from policies.core.policy import History, Key
from policies.core.request import Request

UNKNOWN = 512.0  # expected output tokens before anything has finished


class FewestLeft:
    """Shortest remaining output first: the forced length in a replay, else `max_tokens`, else the mean seen so far."""

    question = "order"
    base = "hybrid"
    lookahead = 4  # up to four behind a head that does not fit may be tried in its stead
    max_skips = 32  # but only so often: then the head blocks the line, so that nobody waits for ever
    fair_by_session = False

    def key(self, request: Request, history: History) -> Key:
        """Tokens left to generate; equal ones in the order in which they came."""
        known = [n for n in (request.forced_output_tokens, request.max_tokens) if n is not None]
        whole = float(min(known)) if known else (history.mean_output(request.cls) or UNKNOWN)
        return (max(whole - request.generated, 0.0), float(request.number))
