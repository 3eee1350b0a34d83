"""`/metrics` against what the scheduler itself knows, and against every single request."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.job import Entry
from engine.server.lane_samples import blocks_by_state
from engine.server.lanes import Lane
from engine.server.metric_table import FAMILIES, SERVER_FAMILIES
from engine.server.metrics import ServerMetrics
from engine.server.observing import Observer
from policies.core.blocks import BlockState
from policies.core.request import Phase, Request, Status
from tests.engine.engine_cases import request
from tests.engine.server.live_house import BUSY, ChangesPolicy, conversation_load, house
from tests.engine.server.live_jobs import play

Page = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def parsed(text: bytes) -> Page:
    """Sample name -> its labels but model and lane -> value; every family as the table has it."""
    known = {family.name: family for family in (*FAMILIES, *SERVER_FAMILIES)}
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        table = known.pop(family.name)
        assert (family.type, family.documentation) == (table.kind, table.help)
        for sample in family.samples:
            labels = tuple((name, value) for name, value in sample.labels.items() if name not in ("model_name", "lane"))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    assert not known
    return found


def one(page: Page, name: str, **labels: str) -> float:
    return page[name][tuple(labels.items())]


class Witness(Observer):
    """Looks at everything, at every step: what no metric may cost."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, str]] = []
        self.token_times_ns: dict[int, list[int]] = {}
        self.num_running: list[int] = []

    def begin(self, lane: Lane) -> None:
        loop = lane.engine.loop
        tell = loop.on_tokens

        def note(numbers: list[int], end_ns: int) -> None:
            for number in numbers:
                self.token_times_ns.setdefault(number, []).append(end_ns)
            assert tell is not None
            tell(numbers, end_ns)

        loop.on_tokens = note

    def ended(self, lane: Lane, entry: Entry) -> None:
        assert entry.sequence is not None
        assert entry.finish_reason is not None
        self.requests.append((entry.sequence.request, entry.finish_reason))


class Scraped:
    """A served load with its page and its witness."""

    def __init__(self, policy: str, **changes: Any) -> None:
        self.metrics, self.witness = ServerMetrics("tiny"), Witness()
        self.house = house([self.metrics, self.witness], policy, **changes)
        self.answers = play(
            self.house,
            [*conversation_load(), request("huge", list(range(90)) * 5, 4), request("none", [], 4)],
            cancelled=lambda id: id in ("r3", "r6"),
        )
        self.page = parsed(self.metrics.exposition(self.house.worker.call))
        self.house.worker.stop()

    def total(self, count: Callable[[Request], int]) -> int:
        return sum(count(each) for each, _ in self.witness.requests)


POLICIES = {
    BUSY: {},
    "full-kv:window=4": {},
    "hybrid:tokens=40,window=4,comes_back=swap,slotted=true": {"host_blocks": 100},
}


@pytest.fixture(scope="module", params=POLICIES)
def scraped(request: pytest.FixtureRequest) -> Scraped:
    return Scraped(request.param, **POLICIES[request.param])


def test_counters_are_the_sums_over_all_requests(scraped: Scraped) -> None:
    page, served = scraped.page, [each for each, reason in scraped.witness.requests if reason != "refused"]
    assert one(page, "vllm:generation_tokens_total") == sum(len(found.token_ids) for found in scraped.answers.values())
    assert one(page, "vllm:generation_tokens_total") == scraped.total(lambda each: each.generated)
    assert one(page, "vllm:prompt_tokens_total") == sum(each.prompt_tokens for each in served if each.generated)
    assert one(page, "vllm:num_preemptions_total") == scraped.total(lambda each: each.preemptions)
    assert one(page, "zlab:preemptions_total", kind="swap") == scraped.total(lambda each: each.swaps)
    assert one(page, "zlab:preemptions_total", kind="recompute") == scraped.total(lambda e: e.preemptions - e.swaps)
    assert one(page, "zlab:compressions_total") == scraped.total(lambda each: each.compressions)
    assert one(page, "zlab:recomputed_tokens_total") == scraped.total(lambda each: each.recomputed_tokens)
    assert one(page, "vllm:prefix_cache_hits_total") > 0
    assert one(page, "vllm:prefix_cache_queries_total") == sum(each.prompt_tokens for each in served)
    endings = Counter(reason for _, reason in scraped.witness.requests)
    assert endings["abort"] == 2
    for reason in ("stop", "length", "abort", "error"):
        assert one(page, "vllm:request_success_total", finished_reason=reason) == endings[reason]
    refused = {reason: value for ((_, reason),), value in page["zlab:requests_refused_total"].items()}
    assert refused == {"too_long": 1, "empty_prompt": 1, "never_fits": 0, "bad_max_tokens": 0}


def test_something_of_each_kind_happened(scraped: Scraped) -> None:
    assert one(scraped.page, "vllm:num_preemptions_total") > 0
    kept, begun = (one(scraped.page, f"zlab:compression_{kind}_tokens_total") for kind in ("kept", "source"))
    assert (0 < kept < begun) == bool(one(scraped.page, "zlab:compressions_total"))


def test_histograms_hold_every_request_once(scraped: Scraped) -> None:
    page = scraped.page
    finished = [each for each, _ in scraped.witness.requests if each.status is Status.FINISHED]
    for name, span_ns in {
        "vllm:e2e_request_latency_seconds": lambda each: each.finish_ns - each.arrival_ns,
        "vllm:request_queue_time_seconds": lambda each: each.first_admitted_ns - each.arrival_ns,
        "vllm:request_prefill_time_seconds": lambda each: each.first_token_ns - each.first_admitted_ns,
        "vllm:request_decode_time_seconds": lambda each: each.finish_ns - each.first_token_ns,
        "vllm:request_inference_time_seconds": lambda each: each.finish_ns - each.first_admitted_ns,
        "vllm:request_prompt_tokens": lambda each: each.prompt_tokens * 10**9,
        "vllm:request_generation_tokens": lambda each: each.generated * 10**9,
    }.items():
        assert one(page, f"{name}_count") == len(finished), name
        assert one(page, f"{name}_sum") == pytest.approx(sum(map(span_ns, finished)) / 1e9), name
    served = [each for each, reason in scraped.witness.requests if reason != "refused"]
    for phase in Phase:
        if phase is not Phase.DONE:
            labels = {"phase": phase.name.lower()}
            assert one(page, "zlab:request_phase_seconds_count", **labels) == len(served)
            spent = sum(each.phase_ns[phase] for each in served) / 1e9
            assert one(page, "zlab:request_phase_seconds_sum", **labels) == pytest.approx(spent, abs=1e-9)
    several = [each for each in finished if each.generated > 1]
    means = [(each.finish_ns - each.first_token_ns) / 1e9 / (each.generated - 1) for each in several]
    assert one(page, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(sum(means))


def test_gaps_between_tokens_are_exact(scraped: Scraped) -> None:
    times = scraped.witness.token_times_ns.values()
    gaps = np.concatenate([np.diff(found) for found in times]) / 1e9
    page = scraped.page
    assert one(page, "vllm:inter_token_latency_seconds_count") == len(gaps)
    assert one(page, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps.sum())
    for ((_, bound),), value in page["vllm:inter_token_latency_seconds_bucket"].items():
        assert value == np.count_nonzero(gaps <= float(bound)), bound
    assert one(page, "vllm:time_to_first_token_seconds_count") == len(times)


def test_steps_are_all_counted(scraped: Scraped) -> None:
    page = scraped.page
    assert one(page, "zlab:steps_total") == one(page, "zlab:step_seconds_count")
    assert one(page, "vllm:iteration_tokens_total_count") == one(page, "zlab:steps_total")
    computed = one(page, "vllm:iteration_tokens_total_sum") - one(page, "vllm:generation_tokens_total")
    recomputed = one(page, "zlab:recomputed_tokens_total")
    looked_up = one(page, "vllm:prefix_cache_queries_total") - one(page, "vllm:prefix_cache_hits_total")
    assert looked_up <= computed <= looked_up + recomputed + scraped.total(lambda each: each.generated)


def test_at_the_end_nothing_is_held(scraped: Scraped) -> None:
    page = scraped.page
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert one(page, name) == 0
    assert one(page, "zlab:query_slots_used") == 0
    assert set(page["zlab:requests_waiting"].values()) == {0.0}
    free = sum(one(page, "zlab:blocks", state=state) for state in ("free", "cached"))
    assert free == sum(page["zlab:blocks"].values()) == 20


def test_every_moment_of_a_run_is_the_schedulers_own() -> None:
    """Scrape after every step, and look at every block and request then."""
    seen: Counter[str] = Counter()
    lanes: list[Lane] = []

    class Looking(Observer):
        def begin(self, lane: Lane) -> None:
            lanes.append(lane)

        def stepped(self, lane: Lane) -> None:
            samples = metrics.snapshot(lanes).lanes["live"]
            flat: dict[str, Any] = {
                f"{name}{''.join(f':{label}' for label in labels)}": value
                for name, rows in samples.items()
                for labels, value in rows
            }
            state = lane.engine.scheduler.state
            pool = state.pool
            assert blocks_by_state(pool) == {
                each: Counter(map(pool.state, range(pool.num_blocks)))[each] for each in BlockState
            }
            phases = Counter(each.phase for each in state.requests.values())
            waiting = list(state.waiting)
            expected = {
                "vllm:num_requests_running": sum(each.line >= 0 for each in state.requests.values()),
                "vllm:num_requests_waiting": len(waiting),
                "zlab:requests_waiting:admission": sum(not each.preemptions for each in waiting),
                "zlab:requests_waiting:readmission": sum(each.preemptions > 0 for each in waiting),
                "zlab:requests_waiting:slot": phases[Phase.WAITS_FOR_SLOT],
                "zlab:requests_waiting:block": phases[Phase.WAITS_FOR_BLOCK],
                "zlab:requests_waiting:step": phases[Phase.PAUSED],
                "zlab:requests_waiting:copy": sum(each.in_flight for each in state.requests.values()),
                "zlab:query_slots_used": sum(each.slot >= 0 for each in state.requests.values()),
                "vllm:kv_cache_usage_perc": sum(refs > 0 for refs in pool.refs) / pool.num_blocks,
            }
            assert {name: flat[name] for name in expected} == expected
            seen.update(name for name, value in expected.items() if value)
            seen.update(f"zlab:blocks:{each.name.lower()}" for each, count in blocks_by_state(pool).items() if count)

    for policy, changes in POLICIES.items():
        metrics = ServerMetrics("tiny")
        lanes.clear()
        served = house([metrics, Looking()], policy, **changes)
        play(served, conversation_load(18))
        served.worker.stop()
        assert not served.worker.observers.failed
    reasons = ("admission", "readmission", "slot", "copy")
    for name in (*(f"zlab:requests_waiting:{reason}" for reason in reasons), "zlab:blocks:shared", "zlab:blocks:held"):
        assert seen[name], name


def test_a_new_engine_goes_on_counting() -> None:
    metrics = ServerMetrics("tiny")
    served = house([metrics])
    first = play(served, conversation_load(6))
    served.worker.call(lambda lanes: setattr(lanes[0].engine.runner, "execute", None)).result()
    play(served, [request("broken", list(range(5, 30)), 4)])
    second = play(served, conversation_load(6))
    page = parsed(metrics.exposition(served.worker.call))
    served.worker.stop()
    tokens = sum(len(answer.token_ids) for answer in (*first.values(), *second.values()))
    assert one(page, "vllm:generation_tokens_total") == tokens
    assert one(page, "vllm:request_success_total", finished_reason="error") == 1
    assert one(page, "vllm:request_success_total", finished_reason="length") == 12
    assert one(page, "zlab:engines_rebuilt_total") == 1
    assert not served.worker.observers.failed


def test_a_change_of_policy_shows() -> None:
    metrics, other = ServerMetrics("tiny"), "full-kv:prefix=none,window=4"
    served = house([metrics, ChangesPolicy(other, every=40)], BUSY, may_become=(other,))
    before = parsed(metrics.exposition(served.worker.call))
    play(served, conversation_load())
    after = parsed(metrics.exposition(served.worker.call))
    queries = one(after, "vllm:prefix_cache_queries_total")
    play(served, [request("alone", list(range(5, 40)), 4)])
    last = parsed(metrics.exposition(served.worker.call))
    served.worker.stop()
    assert not served.worker.observers.failed
    names = [dict(labels)["policy"] for page in (before, after) for labels in page["zlab:policy_info"]]
    assert names == [BUSY, other]
    digests = {dict(labels)["digest"] for page in (before, after) for labels in page["zlab:policy_info"]}
    assert {len(digest) for digest in digests} == {64}
    assert len(digests) == 2
    assert [one(page, "zlab:policy_changes_total") for page in (before, after)] == [0, 1]
    assert queries > 0
    assert one(last, "vllm:prefix_cache_queries_total") == queries, "without a prefix cache nothing is looked up"


def test_an_engine_that_hangs_leaves_the_last_figures() -> None:
    metrics = ServerMetrics("tiny")
    served = house([metrics])
    play(served, conversation_load(4))
    before = parsed(metrics.exposition(served.worker.call))
    time.sleep(0.01)
    silent: Future[Any] = Future()
    after = parsed(metrics.exposition(lambda _: silent, timeout_s=0.01))
    served.worker.stop()
    assert silent.cancelled()
    assert one(after, "zlab:snapshot_age_seconds") >= 0.01
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]
    assert one(before, "zlab:snapshot_age_seconds") == 0


def test_two_servers_in_one_process_do_not_meet() -> None:
    one_, other = ServerMetrics("one"), ServerMetrics("other")
    houses = [house([each]) for each in (one_, other)]
    play(houses[0], conversation_load(3))
    pages = [parsed(each.exposition(its.worker.call)) for each, its in zip((one_, other), houses, strict=True)]
    for each in houses:
        each.worker.stop()
    assert one(pages[0], "vllm:generation_tokens_total") > 0
    assert one(pages[1], "vllm:generation_tokens_total") == 0
