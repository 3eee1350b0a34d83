"""Which replica answers? The one that holds the prompt's first blocks, unless it is too far ahead of the least loaded.

Plain values and no clock, so that the rule can be studied without a server: whoever sends requests tells when one
begins and ends. What a replica holds is estimated from what was sent there, in as many blocks as its cache has.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from policies.core.prefix import chained_hash


def prefix_keys(prompt_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """One key a full block of the prompt; equal keys stand for equal tokens from the prompt's start to that block."""
    keys: list[int] = []
    parent = 0
    for start in range(0, len(prompt_ids) - block_size + 1, block_size):
        parent = chained_hash(parent, tuple(prompt_ids[start : start + block_size]), 0)
        keys.append(parent)
    return tuple(keys)


@dataclass(frozen=True)
class Lead:
    """How many outputs a replica may be ahead of the least loaded: `outputs`, or `share` of the least if more."""

    outputs: int = 4
    share: float = 0.25

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.share < 0:
            raise ValueError(f"a lead is at least 1 output and a share of 0 or more, not {self}")

    def most(self, least: int) -> int:
        """The load that a replica must be below to be sent one more for its prefix."""
        return least + max(self.outputs, int(self.share * least))


@dataclass(frozen=True)
class Routed:
    """Where a request goes and why: first choice first, and the leading blocks that the first choice holds."""

    ranked: tuple[str, ...]
    num_matched: int
    passed_over: bool  # another replica holds more of the prompt and was too far ahead


@dataclass
class RoutingCounts:
    """What the rule has done so far: requests, those that passed a holder over, and blocks of prompts."""

    num_requests: int = 0
    num_passed_over: int = 0
    num_blocks: int = 0
    num_matched_blocks: int = 0


class PrefixAffinity:
    """The rule and what it remembers: a load and the recent blocks of each replica."""

    def __init__(self, capacity_blocks: int, lead: Lead | None = None) -> None:
        """`capacity_blocks`: full blocks that one replica's cache can hold, at least 1; may be changed later."""
        if capacity_blocks < 1:
            raise ValueError(f"a replica holds at least 1 block, not {capacity_blocks}")
        self.lead = lead or Lead()
        self.counts = RoutingCounts()
        self.capacity_blocks = capacity_blocks
        self._held: dict[str, OrderedDict[int, None]] = {}  # the least recently sent first
        self._loads: Counter[str] = Counter()
        self._under_way: dict[Hashable, tuple[str, int]] = {}

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that can be chosen."""
        return tuple(self._held)

    @property
    def loads(self) -> dict[str, int]:
        """Outputs under way by replica."""
        return {replica: self._loads[replica] for replica in self._held}

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """Those that can be chosen from now on; one that is new holds nothing, one that has gone is forgotten."""
        wanted = list(replicas)
        self._held = {replica: self._held.get(replica, OrderedDict()) for replica in wanted}

    def choose(self, keys: Sequence[int]) -> Routed:
        """Rank all replicas for a prompt with these keys; changes nothing. Raises LookupError when there is none.

        Of those that may take one more (`Lead`), whoever holds most leading blocks comes first; then the less loaded,
        then the one that holds less, so that new prefixes spread over the caches. Those too far ahead follow by load.
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
            return (ahead, load if ahead else 0, -matched[replica], load, held, _tie(replica, first))

        ranked = tuple(sorted(self._held, key=order))
        return Routed(ranked, matched[ranked[0]], matched[ranked[0]] < max(matched.values()))

    def begin(self, request: Hashable, replica: str, keys: Sequence[int], num_outputs: int = 1) -> None:
        """A request has been sent: its outputs count as load until `end`, its blocks as held."""
        self.end(request)
        self._under_way[request] = (replica, num_outputs)
        self._loads[replica] += num_outputs
        held = self._held.get(replica)
        if held is None:
            return  # it went while the request was on its way
        for key in reversed(keys):  # the first block last: of a chain, the end is forgotten first
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def end(self, request: Hashable) -> None:
        """A request has ended, whichever way; unknown ones are none."""
        replica, num_outputs = self._under_way.pop(request, ("", 0))
        self._loads[replica] -= num_outputs
        if not self._loads[replica]:
            del self._loads[replica]

    def route(self, request: Hashable, keys: Sequence[int], num_outputs: int = 1) -> Routed:
        """`choose`, and `begin` at the first choice."""
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
    """A stable shuffle (rendezvous hashing): the same on every machine, another for every prefix."""
    return hashlib.blake2b(f"{replica} {key}".encode(), digest_size=8).digest()
