"""Who is next? The request with the fewest tokens left to generate, as far as a server can know.

Use it by its path: `zlab replay TRACE --policy docs/examples/fewest_left.py:FewestLeft`, or vary it
like any other policy: `docs/examples/fewest_left.py:FewestLeft:prefix=none`.

The base class says which question the class answers and has a default for every other member; the
preset `base` answers the other questions (`hybrid` if left out). The class is made without
arguments. A file that answers another question has that question's base class: `Budget`,
`Preemption`, or one of `zlab.policies.core.policy`.
What a request's output will be, nobody knows before it ends: a replay does, and
`policies/ordering.py` has an `oracle` that looks, to bound what any guess like this one could gain.
"""

from zlab import Order
from zlab.policies.core.policy import History, Key
from zlab.policies.core.request import Request

UNKNOWN = 512.0  # expected output tokens before anything has finished


class FewestLeft(Order):
    """Shortest expected rest first: the mean output of finished requests of its class, at most
    `max_tokens`.
    """

    lookahead = 4  # up to four behind a head that does not fit may be tried in its stead
    max_skips = (
        32  # but only so often: then the head blocks the queue, so that it is served at last
    )

    def key(self, request: Request, stats: History) -> Key:
        """Tokens expected to be left; equal ones in the order in which they came."""
        mean = stats.mean_output(request.request_class) or UNKNOWN
        left = mean - request.num_output_tokens
        if left <= 0:
            # It has outlived the guess. Lengths are heavy-tailed: expect as much again.
            left = float(request.num_output_tokens)
        if request.max_tokens is not None:
            left = min(left, request.max_tokens - request.num_output_tokens)
        return (left, float(request.number))
