"""`/metrics` against what the scheduler itself knows, and against every single request.

The parts that metrics are made of: gaps between tokens, buckets, and the table that documents them.

`/metrics` of a whole server over HTTP, with what it records.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.engine_cases import SMALL, request
from tests.engine.server.server_cases import (
    BUSY,
    WAIT_S,
    ChangesPolicy,
    conversation_load,
    open_tiny,
    play,
)
from tests.shared import REPOSITORY
from zlab.engine.server.context import ServerContext
from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import Lane, Observer
from zlab.engine.server.launch import ServerPlan, open_server
from zlab.engine.server.metrics import (
    LANE_METRICS,
    LATENCY_S,
    SERVER_METRICS,
    STEP_S,
    STEP_TOKENS,
    Histogram,
    Metric,
    ServerMetrics,
    TokenGaps,
    lengths_up_to,
)
from zlab.engine.server.middleware import Keys
from zlab.engine.server.traffic_recorder import RecordSettings
from zlab.policies.core.request import Request
from zlab.traces.formats import read_trace
from zlab.traces.recording import load_run
from zlab.traces.schema import BlockState, Phase, Status

METRICS: list[Metric[Any]] = [*LANE_METRICS, *SERVER_METRICS]
Page = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def parsed(text: bytes) -> Page:
    """Sample name -> its labels but model and lane -> value; every family as the table has it."""
    known = {family.name: family for family in METRICS}
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        table = known.pop(family.name)
        assert (family.type, family.documentation) == (table.kind, table.help)
        for sample in family.samples:
            labels = tuple(
                (name, value)
                for name, value in sample.labels.items()
                if name not in ("model_name", "lane")
            )
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
        (tell,) = lane.engine.token_listeners

        def note(numbers: list[int], end_ns: int) -> None:
            for number in numbers:
                self.token_times_ns.setdefault(number, []).append(end_ns)
            tell(numbers, end_ns)

        lane.engine.token_listeners[:] = [note]

    def ended(self, lane: Lane, output: Output) -> None:
        assert output.finish_reason is not None
        self.requests.append((output.engine_request.request, output.finish_reason))


class Scraped:
    """A served load with its page and its witness."""

    def __init__(self, policy: str, **changes: Any) -> None:
        self.metrics, self.witness = ServerMetrics("tiny"), Witness()
        self.context = open_tiny([self.metrics, self.witness], policy, **changes)
        self.answers = play(
            self.context,
            [*conversation_load(), request("huge", list(range(90)) * 5, 4), request("none", [], 4)],
            cancelled=lambda id: id in ("r3", "r6"),
        )
        self.page = parsed(self.metrics.exposition(self.context.worker.call, WAIT_S))
        self.context.worker.stop()

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
    page, served = (
        scraped.page,
        [each for each, reason in scraped.witness.requests if reason != "refused"],
    )
    assert one(page, "vllm:generation_tokens_total") == sum(
        len(found.token_ids) for found in scraped.answers.values()
    )
    assert one(page, "vllm:generation_tokens_total") == scraped.total(lambda each: each.generated)
    assert one(page, "vllm:prompt_tokens_total") == sum(
        each.prompt_tokens for each in served if each.generated
    )
    assert one(page, "vllm:num_preemptions_total") == scraped.total(lambda each: each.preemptions)
    assert one(page, "zlab:preemptions_total", kind="swap") == scraped.total(
        lambda each: each.swaps
    )
    assert one(page, "zlab:preemptions_total", kind="recompute") == scraped.total(
        lambda e: e.preemptions - e.swaps
    )
    assert one(page, "zlab:compressions_total") == scraped.total(lambda each: each.compressions)
    assert one(page, "zlab:recomputed_tokens_total") == scraped.total(
        lambda each: each.recomputed_tokens
    )
    assert one(page, "vllm:prefix_cache_hits_total") > 0
    assert one(page, "vllm:prefix_cache_queries_total") == sum(
        each.prompt_tokens for each in served
    )
    endings = Counter(reason for _, reason in scraped.witness.requests)
    assert endings["abort"] == 2
    for reason in ("stop", "length", "abort", "error"):
        assert one(page, "vllm:request_success_total", finished_reason=reason) == endings[reason]
    refused = {
        reason: value for ((_, reason),), value in page["zlab:requests_refused_total"].items()
    }
    assert refused == {"too_long": 1, "empty_prompt": 1, "never_fits": 0, "bad_max_tokens": 0}


def test_something_of_each_kind_happened(scraped: Scraped) -> None:
    assert one(scraped.page, "vllm:num_preemptions_total") > 0
    kept, begun = (
        one(scraped.page, f"zlab:compression_{kind}_tokens_total") for kind in ("kept", "source")
    )
    assert (0 < kept < begun) == bool(one(scraped.page, "zlab:compressions_total"))


def test_histograms_hold_every_request_once(scraped: Scraped) -> None:
    page = scraped.page
    finished = [each for each, _ in scraped.witness.requests if each.status is Status.FINISHED]
    for name, span_ns in {
        "vllm:e2e_request_latency_seconds": lambda each: each.finish_ns - each.arrival_ns,
        "vllm:request_queue_time_seconds": lambda each: each.first_admitted_ns - each.arrival_ns,
        "vllm:request_prefill_time_seconds": lambda each: (
            each.first_token_ns - each.first_admitted_ns
        ),
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
            assert one(page, "zlab:request_phase_seconds_sum", **labels) == pytest.approx(
                spent, abs=1e-9
            )
    several = [each for each in finished if each.generated > 1]
    means = [
        (each.finish_ns - each.first_token_ns) / 1e9 / (each.generated - 1) for each in several
    ]
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
    computed = one(page, "vllm:iteration_tokens_total_sum") - one(
        page, "vllm:generation_tokens_total"
    )
    recomputed = one(page, "zlab:recomputed_tokens_total")
    looked_up = one(page, "vllm:prefix_cache_queries_total") - one(
        page, "vllm:prefix_cache_hits_total"
    )
    assert (
        looked_up <= computed <= looked_up + recomputed + scraped.total(lambda each: each.generated)
    )


def test_at_the_end_nothing_is_held(scraped: Scraped) -> None:
    page = scraped.page
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ):
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
            assert pool.count_states() == {
                each: Counter(map(pool.state, range(pool.num_blocks)))[each] for each in BlockState
            }
            phases = Counter(each.phase for each in state.requests.values())
            waiting = list(state.waiting)
            expected = {
                "vllm:num_requests_running": sum(
                    each.line >= 0 for each in state.requests.values()
                ),
                "vllm:num_requests_waiting": len(waiting),
                "zlab:requests_waiting:admission": sum(not each.preemptions for each in waiting),
                "zlab:requests_waiting:readmission": sum(each.preemptions > 0 for each in waiting),
                "zlab:requests_waiting:slot": phases[Phase.WAITS_FOR_SLOT],
                "zlab:requests_waiting:block": phases[Phase.WAITS_FOR_BLOCK],
                "zlab:requests_waiting:step": phases[Phase.PAUSED],
                "zlab:requests_waiting:copy": sum(
                    each.in_flight for each in state.requests.values()
                ),
                "zlab:query_slots_used": sum(each.slot >= 0 for each in state.requests.values()),
                "vllm:kv_cache_usage_perc": sum(refs > 0 for refs in pool.refs) / pool.num_blocks,
            }
            assert {name: flat[name] for name in expected} == expected
            seen.update(name for name, value in expected.items() if value)
            seen.update(
                f"zlab:blocks:{each.label}" for each, count in pool.count_states().items() if count
            )

    for policy, changes in POLICIES.items():
        metrics = ServerMetrics("tiny")
        lanes.clear()
        served = open_tiny([metrics, Looking()], policy, **changes)
        play(served, conversation_load(18))
        served.worker.stop()
        assert not served.worker.observers.failed
    reasons = ("admission", "readmission", "slot", "copy")
    for name in (
        *(f"zlab:requests_waiting:{reason}" for reason in reasons),
        "zlab:blocks:shared",
        "zlab:blocks:held",
    ):
        assert seen[name], name


def test_a_new_engine_goes_on_counting() -> None:
    metrics = ServerMetrics("tiny")
    served = open_tiny([metrics])
    first = play(served, conversation_load(6))
    served.worker.call(lambda lanes: setattr(lanes[0].engine.runner, "execute", None)).result()
    play(served, [request("broken", list(range(5, 30)), 4)])
    second = play(served, conversation_load(6))
    page = parsed(metrics.exposition(served.worker.call, WAIT_S))
    served.worker.stop()
    tokens = sum(len(answer.token_ids) for answer in (*first.values(), *second.values()))
    assert one(page, "vllm:generation_tokens_total") == tokens
    assert one(page, "vllm:request_success_total", finished_reason="error") == 1
    assert one(page, "vllm:request_success_total", finished_reason="length") == 12
    assert one(page, "zlab:engines_rebuilt_total") == 1
    assert not served.worker.observers.failed


def test_a_change_of_policy_shows() -> None:
    metrics, other = ServerMetrics("tiny"), "full-kv:prefix=none,window=4"
    served = open_tiny([metrics, ChangesPolicy(other, every=40)], BUSY, may_become=(other,))
    before = parsed(metrics.exposition(served.worker.call, WAIT_S))
    play(served, conversation_load())
    after = parsed(metrics.exposition(served.worker.call, WAIT_S))
    queries = one(after, "vllm:prefix_cache_queries_total")
    play(served, [request("alone", list(range(5, 40)), 4)])
    last = parsed(metrics.exposition(served.worker.call, WAIT_S))
    served.worker.stop()
    assert not served.worker.observers.failed
    names = [
        dict(labels)["policy"] for page in (before, after) for labels in page["zlab:policy_info"]
    ]
    assert names == [BUSY, other]
    digests = {
        dict(labels)["digest"] for page in (before, after) for labels in page["zlab:policy_info"]
    }
    assert {len(digest) for digest in digests} == {64}
    assert len(digests) == 2
    assert [one(page, "zlab:policy_changes_total") for page in (before, after)] == [0, 1]
    assert queries > 0
    assert one(last, "vllm:prefix_cache_queries_total") == queries, (
        "without a prefix cache nothing is looked up"
    )


def test_an_engine_that_hangs_leaves_the_last_figures() -> None:
    metrics = ServerMetrics("tiny")
    served = open_tiny([metrics])
    play(served, conversation_load(4))
    before = parsed(metrics.exposition(served.worker.call, WAIT_S))
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
    contexts = [open_tiny([each]) for each in (one_, other)]
    play(contexts[0], conversation_load(3))
    pages = [
        parsed(each.exposition(its.worker.call, WAIT_S))
        for each, its in zip((one_, other), contexts, strict=True)
    ]
    for each in contexts:
        each.worker.stop()
    assert one(pages[0], "vllm:generation_tokens_total") > 0
    assert one(pages[1], "vllm:generation_tokens_total") == 0


def test_gaps_of_a_mixed_life_are_exact() -> None:
    """Joins, pauses and ends in any order, against each request's own list of times."""
    rng = np.random.default_rng(5)
    gaps = TokenGaps(Histogram(STEP_S))
    times: dict[int, list[int]] = {}
    live: list[int] = []
    total, count, now, newest = 0, 0, 0, 0
    for _ in range(2000):
        now += int(rng.integers(1, 50_000_000))
        if rng.random() < 0.2:
            live.append(newest)
            newest += 1
        if live and rng.random() < 0.1:
            gone = live.pop(int(rng.integers(len(live))))
            gaps.forget(gone)
            times.pop(gone, None)
        members = (
            [number for number in live if rng.random() < 0.9] if rng.random() < 0.3 else list(live)
        )
        gaps.step(members, now)
        for number in members:
            if number in times:
                total, count = total + now - times[number][-1], count + 1
            times.setdefault(number, []).append(now)
    assert sum(gaps.histogram.counts) == count > 5000
    assert gaps.histogram.total == pytest.approx(total / 1e9)
    assert len(gaps._last_ns) <= len(live)


@pytest.mark.parametrize("bounds", [LATENCY_S, STEP_S, STEP_TOKENS, lengths_up_to(40960)])
def test_buckets_rise_and_count_what_is_at_most_their_bound(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    single, bulk = Histogram(bounds), Histogram(bounds)
    values = np.array([0.0, *bounds, bounds[-1] * 2, bounds[0] * 1.01])
    for value in values.tolist():
        single.add(value)
    bulk.add_all(values)
    assert single.counts == bulk.counts
    for name, number in bulk.buckets():
        assert number == np.count_nonzero(values <= float(name))


def documented(metric: Metric[Any]) -> str:
    """Return the metric's row in docs/SERVE_METRICS.md."""
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    row = f"| `{name}` | {metric.kind} | {labels} | {metric.help} |"
    ours = metric in LANE_METRICS and metric.name.startswith("zlab:")
    return f"{row} {metric.vllm} |" if ours else row


def test_the_document_has_every_metric_with_its_meaning_and_no_other() -> None:
    text = (REPOSITORY / "docs" / "SERVE_METRICS.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if re.match(r"\| `(vllm|zlab):", row)]
    assert rows == [documented(metric) for metric in METRICS]


KEY = "a-key-of-some-length"
PROMPT = list(range(5, 40))
ENGINE = replace(SMALL, model="dummy:tiny")


async def served(plan: ServerPlan) -> tuple[ServerContext, list[httpx.Response]]:
    """A few requests, good and bad, and then the metrics."""
    context, app = open_server(plan)
    transport, wanted = httpx.ASGITransport(app), {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        body = {"model": "tiny-there", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answers = [
            await client.post("/v1/completions", json=body, headers=wanted),
            await client.post(
                "/v1/completions", json=body | {"max_tokens": "many"}, headers=wanted
            ),
            await client.post("/v1/completions", json=body),
            await client.get("/nowhere/7", headers=wanted),
            await client.get("/metrics"),
        ]
    return context, answers


@pytest.mark.parametrize("steps", [True, False])
def test_a_server_shows_and_records_what_it_did(tmp_path: Path, steps: bool) -> None:
    plan = ServerPlan(
        engine=ENGINE,
        policy="full-kv:window=4",
        keys=Keys.of([KEY]),
        served_model="tiny-there",
        record=tmp_path,
        record_settings=RecordSettings(steps=steps),
    )
    context, answers = asyncio.run(served(plan))
    context.close(timeout_s=30)
    assert [answer.status_code for answer in answers] == [200, 400, 401, 404, 200]
    assert answers[-1].headers["content-type"] == CONTENT_TYPE_LATEST
    page = parsed(answers[-1].content)
    assert one(page, "vllm:generation_tokens_total") == 8
    assert one(page, "vllm:prompt_tokens_total") == len(PROMPT)
    assert 'model_name="tiny-there"' in answers[-1].text
    counted = {
        tuple(dict(labels).values()): value
        for labels, value in page["zlab:http_responses_total"].items()
    }
    assert counted == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "400"): 1,
        ("elsewhere", "401"): 1,
        ("elsewhere", "404"): 1,
    }
    assert one(page, "zlab:recording_failed") == 0
    (folder,) = tmp_path.iterdir()
    (row,) = read_trace(folder / "trace-00000.jsonl")
    assert (row.prompt_tokens, row.output_tokens, row.prompt_ids) == (len(PROMPT), 8, None)
    assert (folder / "live").exists() == steps
    if steps:
        run = load_run(folder / "live")
        assert run.manifest["complete"]
        assert run.summary["output_tokens"] == 8
