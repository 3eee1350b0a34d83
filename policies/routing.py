"""Routing: which replica serves a request.

The request goes to the replica that holds the first blocks of its prompt, unless that replica has
much more load than the least loaded one. The rule is made of plain values and has no clock: the
sender reports when a request begins and ends. What a replica holds is estimated from what was sent
there, in as many blocks as its cache has.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from zlab.policies.core.block_pool import chained_hash


def prefix_keys(prompt_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return one key for each full block of the prompt; equal keys mean equal tokens up to that
    block.
    """
    keys: list[int] = []
    parent = 0
    for start in range(0, len(prompt_ids) - block_size + 1, block_size):
        parent = chained_hash(parent, tuple(prompt_ids[start : start + block_size]), 0)
        keys.append(parent)
    return tuple(keys)


@dataclass(frozen=True)
class LoadSlack:
    """How many outputs a replica may be ahead of the least loaded: `outputs`, or `share` of the
    least if that is more.
    """

    outputs: int = 4
    share: float = 0.25

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.share < 0:
            raise ValueError(f"a lead is at least 1 output and a share of 0 or more, not {self}")

    def most(self, least: int) -> int:
        """Return the load below which a replica is sent one more request for its prefix."""
        return least + max(self.outputs, int(self.share * least))


@dataclass(frozen=True)
class Routed:
    """Where a request goes: replicas by preference, and the leading blocks that the first one
    holds.
    """

    ranked: tuple[str, ...]
    num_matched: int
    passed_over: bool  # another replica holds more of the prompt and had too much load


@dataclass
class RoutingCounts:
    """What the rule has done: requests, requests sent elsewhere than to the holder, and blocks of
    prompts.
    """

    num_requests: int = 0
    num_passed_over: int = 0
    num_blocks: int = 0
    num_matched_blocks: int = 0


class PrefixAffinity:
    """The rule and its memory: load and recent blocks of each replica."""

    def __init__(self, capacity_blocks: int, lead: LoadSlack | None = None) -> None:
        """Create the rule. `capacity_blocks`: full blocks that one replica's cache holds, at least
        1; it may be changed later.
        """
        if capacity_blocks < 1:
            raise ValueError(f"a replica holds at least 1 block, not {capacity_blocks}")
        self.lead = lead or LoadSlack()
        self.counts = RoutingCounts()
        self.capacity_blocks = capacity_blocks
        self._held: dict[str, OrderedDict[int, None]] = {}  # the least recently sent first
        self._loads: Counter[str] = Counter()
        self._under_way: dict[Hashable, tuple[str, int]] = {}

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that can be chosen."""
        return tuple(self._held)

    @property
    def loads(self) -> dict[str, int]:
        """Outputs in progress by replica."""
        return {replica: self._loads[replica] for replica in self._held}

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """Set the replicas that can be chosen. A new one holds nothing; one that is gone is
        forgotten.
        """
        wanted = list(replicas)
        self._held = {replica: self._held.get(replica, OrderedDict()) for replica in wanted}

    def choose(self, keys: Sequence[int]) -> Routed:
        """Rank all replicas for a prompt with these keys; this changes nothing.

        Of the replicas that may take one more (`LoadSlack`), the one that holds most leading blocks
        comes first, then the less loaded, then the one that holds less, so that new prefixes spread
        over the caches. Overloaded replicas follow by load. Raises LookupError when there is none.
        """
        if not self._held:
            raise LookupError("no replica to choose from")
        matched = {replica: self._num_matched(replica, keys) for replica in self._held}
        most = self.lead.most(min(self._loads[replica] for replica in self._held))
        first = keys[0] if keys else 0

        def order(replica: str) -> tuple[object, ...]:
            load = self._loads[replica]
            ahead = load >= most
            held = len(self._held[replica])
            return (
                ahead,
                load if ahead else 0,
                -matched[replica],
                load,
                held,
                _tie(replica, first),
            )

        ranked = tuple(sorted(self._held, key=order))
        return Routed(ranked, matched[ranked[0]], matched[ranked[0]] < max(matched.values()))

    def begin(
        self, request: Hashable, replica: str, keys: Sequence[int], num_outputs: int = 1
    ) -> None:
        """Record that a request was sent: its outputs count as load until `end`, its blocks as
        held.
        """
        self.end(request)
        self._under_way[request] = (replica, num_outputs)
        self._loads[replica] += num_outputs
        held = self._held.get(replica)
        if held is None:
            return  # the replica went while the request was on its way
        for key in reversed(keys):  # the first block last: of a chain, the end is forgotten first
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def end(self, request: Hashable) -> None:
        """Record that a request has ended. Unknown requests are ignored."""
        replica, num_outputs = self._under_way.pop(request, ("", 0))
        self._loads[replica] -= num_outputs
        if not self._loads[replica]:
            del self._loads[replica]

    def route(self, request: Hashable, keys: Sequence[int], num_outputs: int = 1) -> Routed:
        """Call `choose`, and `begin` at the first choice."""
        routed = self.choose(keys)
        self.begin(request, routed.ranked[0], keys, num_outputs)
        counts = self.counts
        counts.num_requests += 1
        counts.num_passed_over += routed.passed_over
        counts.num_blocks += len(keys)
        counts.num_matched_blocks += routed.num_matched
        return routed

    def _num_matched(self, replica: str, keys: Sequence[int]) -> int:
        held = self._held[replica]
        for place, key in enumerate(keys):
            if key not in held:
                return place
        return len(keys)


def _tie(replica: str, key: int) -> bytes:
    """Return a stable shuffle (rendezvous hashing): the same on every machine, another for every
    prefix.
    """
    return hashlib.blake2b(f"{replica} {key}".encode(), digest_size=8).digest()
