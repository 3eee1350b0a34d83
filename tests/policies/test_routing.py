"""The affinity rule alone: what it finds against random routing, what it never exceeds, what it
forgets.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlab.policies.routing import LoadSlack, PrefixAffinity, prefix_keys
from zlab.traces.synthetic import ChatShape, Poisson, SharedPrefixShape, chat, shared_prefix
from zlab.traces.workload import TraceRequest, Workload

REPLICAS = ("0", "1", "2", "3")
SERVICE_S = 8.0


class LeastRecentlyUsed:
    """A replica's prefix cache as it is, which the rule cannot see."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, keys: Sequence[int]) -> int:
        """Blocks found from the start on; all are kept then, the end of the chain to be dropped
        first.
        """
        found = next(
            (place for place, key in enumerate(keys) if key not in self._blocks), len(keys)
        )
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return found


def keys_of(request: TraceRequest) -> tuple[int, ...]:
    assert request.prefix_ids is not None
    return request.prefix_ids


def run(
    workload: Workload, capacity: int, choose: Callable[[PrefixAffinity, str, tuple[int, ...]], str]
) -> tuple[float, int]:
    """Share of prompt blocks found in the caches, and the most that one replica was ever ahead of
    another.
    """
    rule = PrefixAffinity(capacity)
    rule.set_replicas(REPLICAS)
    caches = {replica: LeastRecentlyUsed(capacity) for replica in REPLICAS}
    ends: list[tuple[float, str]] = []
    found = asked = most_ahead = 0
    for request in workload:
        assert request.arrival_s is not None
        while ends and ends[0][0] <= request.arrival_s:
            rule.end(heapq.heappop(ends)[1])
        keys = keys_of(request)
        replica = choose(rule, request.id, keys)
        loads = rule.loads.values()
        most_ahead = max(most_ahead, max(loads) - min(loads))
        heapq.heappush(ends, (request.arrival_s + SERVICE_S, request.id))
        found += caches[replica].take(keys)
        asked += len(keys)
    return found / asked, most_ahead


def by_affinity(rule: PrefixAffinity, request: str, keys: tuple[int, ...]) -> str:
    return rule.route(request, keys).ranked[0]


def at_random(seed: int) -> Callable[[PrefixAffinity, str, tuple[int, ...]], str]:
    generator = random.Random(seed)

    def choose(rule: PrefixAffinity, request: str, keys: tuple[int, ...]) -> str:
        replica = generator.choice(REPLICAS)
        rule.begin(request, replica, keys)
        return replica

    return choose


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_few_shot_groups_are_found_again_where_random_routing_loses_them(seed: int) -> None:
    shape = SharedPrefixShape(num_groups=16, shared_tokens=1024, skew=0.0)
    workload = shared_prefix(1500, shape, Poisson(4.0), seed)
    capacity = 6 * 64 + 64  # six of the sixteen groups fit a replica
    with_affinity, ahead = run(workload, capacity, by_affinity)
    by_chance, _ = run(workload, capacity, at_random(seed))
    assert with_affinity > 0.8
    assert with_affinity > by_chance + 0.25
    assert (
        ahead <= LoadSlack().outputs + 8
    )  # 32 requests under way: eight a replica, and all may end on one of them


@pytest.mark.parametrize("seed", [0, 1])
def test_a_conversation_comes_back_to_where_its_turns_are(seed: int) -> None:
    workload = chat(1500, ChatShape(num_system_prompts=4, mean_turns=6.0), Poisson(1.0), seed)
    with_affinity, _ = run(workload, 4000, by_affinity)
    by_chance, _ = run(workload, 4000, at_random(seed))
    assert with_affinity > by_chance + 0.15


def test_one_prefix_for_all_is_spread_as_far_as_the_bound_says() -> None:
    rule = PrefixAffinity(100, LoadSlack(outputs=3, share=0.5))
    rule.set_replicas(["a", "b"])
    keys = (1, 2, 3)
    chosen = [rule.route(number, keys).ranked[0] for number in range(4)]
    assert len(set(chosen[:3])) == 1
    assert chosen[3] != chosen[0]
    assert rule.counts.num_passed_over == 1
    for number in range(4, 40):
        rule.route(number, keys)
    assert abs(rule.loads["a"] - rule.loads["b"]) <= 1, "both hold it by now, so load decides"
    assert rule.counts.num_matched_blocks == 3 * 38


def test_new_prefixes_spread_over_idle_replicas() -> None:
    rule = PrefixAffinity(1000)
    rule.set_replicas(REPLICAS)
    homes = []
    for number in range(40):
        homes.append(rule.route(number, (number * 2, number * 2 + 1)).ranked[0])
        rule.end(number)
    assert sorted(homes) == sorted(REPLICAS * 10)
    again = [rule.choose((number * 2, number * 2 + 1)).ranked[0] for number in range(40)]
    assert again == homes


def test_the_longest_match_wins_over_a_shorter_one() -> None:
    rule = PrefixAffinity(10)
    rule.set_replicas(["a", "b"])
    rule.begin("first", "a", (1, 2))
    rule.begin("second", "b", (1, 2, 3))
    assert rule.choose((1, 2, 3, 4)).ranked == ("b", "a")
    assert rule.choose((1, 2, 3, 4)).num_matched == 3
    assert rule.choose((1, 7)).num_matched == 1
    assert rule.choose((7, 2, 3)).num_matched == 0, "a block counts only after the blocks before it"


def test_what_is_sent_last_is_kept_and_the_end_of_a_chain_goes_first() -> None:
    rule = PrefixAffinity(4)
    rule.set_replicas(["a"])
    rule.begin(0, "a", (1, 2, 3))
    rule.begin(1, "a", (4, 5))
    assert rule.choose((1, 2, 3)).num_matched == 2
    assert rule.choose((4, 5)).num_matched == 2
    rule.begin(2, "a", (6, 7, 8, 9, 10))  # more than there is room for
    assert rule.choose((6, 7, 8, 9, 10)).num_matched == 4
    assert rule.choose((1,)).num_matched == 0


def test_a_replica_that_goes_takes_its_blocks_with_it() -> None:
    rule = PrefixAffinity(10)
    rule.set_replicas(["a", "b"])
    rule.begin("x", "a", (1, 2))
    rule.set_replicas(["b"])
    assert rule.loads == {"b": 0}
    assert rule.choose((1, 2)).ranked == ("b",)
    rule.end("x")
    rule.set_replicas(["a", "b"])
    assert rule.choose((1, 2)).num_matched == 0
    assert rule.loads == {"a": 0, "b": 0}
    with pytest.raises(LookupError, match="no replica"):
        PrefixAffinity(10).choose((1,))


def test_a_request_for_many_outputs_weighs_as_many() -> None:
    rule = PrefixAffinity(10, LoadSlack(outputs=4))
    rule.set_replicas(["a", "b"])
    home = rule.route("many", (1,), num_outputs=8).ranked[0]
    assert rule.loads[home] == 8
    assert rule.choose((1,)).ranked[0] != home
    rule.end("many")
    assert rule.choose((1,)).ranked[0] == home


def test_a_request_sent_elsewhere_after_all_counts_once() -> None:
    rule = PrefixAffinity(10)
    rule.set_replicas(["a", "b"])
    first = rule.route("x", (1,)).ranked
    rule.begin("x", first[1], (1,))
    assert rule.loads == {first[0]: 0, first[1]: 1}
    rule.end("x")
    rule.end("x")
    assert rule.loads == {"a": 0, "b": 0}


@given(st.data(), st.integers(1, 5), st.floats(0, 1), st.integers(1, 4))
def test_no_route_brings_a_replica_past_the_bound(
    data: st.DataObject, outputs: int, share: float, num_replicas: int
) -> None:
    rule = PrefixAffinity(20, LoadSlack(outputs, share))
    rule.set_replicas(str(number) for number in range(num_replicas))
    alive: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 60))):
        if len(alive) > 0 and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(sorted(alive)))
            rule.end(ended)
            del alive[ended]
        least = min(rule.loads.values())
        num_outputs = data.draw(st.integers(1, 3))
        routed = rule.route(number, (data.draw(st.integers(0, 2)), 9), num_outputs)
        assert sorted(routed.ranked) == sorted(rule.replicas)
        assert rule.loads[routed.ranked[0]] < rule.lead.most(least) + num_outputs
        alive[number] = num_outputs
        assert sum(rule.loads.values()) == sum(alive.values())


def test_keys_stand_for_everything_before_them() -> None:
    prompt = list(range(10))
    assert len(prefix_keys(prompt, 4)) == 2, "only full blocks have a key"
    assert prefix_keys(prompt[:3], 4) == ()
    assert prefix_keys(prompt, 4)[:1] == prefix_keys(prompt[:5], 4)
    other = [99, *prompt[1:]]
    assert set(prefix_keys(prompt, 4)).isdisjoint(prefix_keys(other, 4))
    assert prefix_keys([7] * 8, 4)[0] != prefix_keys([7] * 8, 4)[1]


def test_keys_are_the_same_in_every_process() -> None:
    assert prefix_keys([1, 2, 3, 4], 2) == prefix_keys((1, 2, 3, 4), 2)
    assert prefix_keys([1, 2, 3, 4], 2) == KNOWN_KEYS


KNOWN_KEYS = (8726273554940616149, 8708482986278984470)


@pytest.mark.parametrize(("outputs", "share"), [(0, 0.5), (2, -0.1)])
def test_a_lead_that_forbids_every_choice_is_refused(outputs: int, share: float) -> None:
    with pytest.raises(ValueError, match="a lead is at least 1 output"):
        LoadSlack(outputs, share)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        PrefixAffinity(0)
