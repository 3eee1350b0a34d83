"""The waiting line against a list that is sorted anew each time, and what skip-ahead may do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.drive import Case, drive, job
from tests.policies.stage import Stage
from zlab.policies.core.block_pool import PromptContent
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Order
from zlab.policies.core.request import Request
from zlab.policies.core.request_queue import RequestQueue
from zlab.policies.ordering import (
    ClassMean,
    FairShare,
    FirstCome,
    NoisyOracle,
    Oracle,
    PriorityWithAgeing,
    ShortestOutput,
    ShortestPrompt,
)
from zlab.policies.spec import load_policy
from zlab.traces.schema import EventKind


def request(
    number: int, session: str | None = None, prompt: int = 5, output: int = 9, priority: int = 0
) -> Request:
    made = Request(
        number,
        f"r{number}",
        0,
        prompt,
        output,
        output,
        PromptContent(prompt, 4, None, None, None),
        session,
        "c",
        priority,
    )
    made.target_tokens = output
    return made


class NaiveFairLine:
    """One dictionary of counters; every question looks at everybody."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.service: dict[str | None, int] = {}
        self.level = 0

    def push(self, request: Request) -> None:
        if all(other.session != request.session for other in self.waiting):
            self.service[request.session] = max(self.service.get(request.session, 0), self.level)
        self.waiting.append(request)

    def first(self) -> Request | None:
        if not self.waiting:
            return None
        return min(self.waiting, key=lambda one: (self.service[one.session], one.number))

    def serve(self, request: Request) -> None:
        self.waiting.remove(request)
        self.level = self.service[request.session]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("serve"), st.integers(1, 50)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("charge"), st.sampled_from([None, "a", "b", "c"])),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS, st.booleans())
def test_fair_share_equals_a_naive_token_counter(
    steps: list[tuple[str, object]], look: bool
) -> None:
    line, naive, number = RequestQueue(FairShare()), NaiveFairLine(), 0
    for what, value in steps:
        if what == "push":
            made = request(number, value)  # type: ignore[arg-type]
            number += 1
            line.push(made, (float(made.number),))
            naive.push(made)
        elif what == "serve" and naive.waiting:
            head = line.first()
            assert head is naive.first()
            assert head is not None
            line.serve(head)
            naive.serve(head)
            line.charge(head, int(value))  # type: ignore[call-overload]
            naive.service[head.session] += int(value)  # type: ignore[call-overload]
        elif what == "leave" and naive.waiting:
            gone = naive.waiting.pop(int(value) % len(naive.waiting))  # type: ignore[call-overload]
            line.remove(gone)
        elif what == "charge" and value in naive.service:
            line.charge(request(0, value), 10)
            naive.service[value] += 10
        assert len(line) == len(naive.waiting)
        if look:  # or not: who asks changes nothing
            assert line.first() is naive.first()
        assert set(line) == set(naive.waiting)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30), st.integers(0, 5))
def test_one_line_equals_a_sorted_list(steps: list[tuple[int, int]], ahead: int) -> None:
    line = RequestQueue(FirstCome())
    naive: list[tuple[int, int, Request]] = []
    for number, (key, what) in enumerate(steps):
        if what == 0 and naive:
            gone = naive.pop(key % len(naive))
            line.remove(gone[2])
            assert gone[2] not in line
        else:
            made = request(number)
            line.push(made, (float(key),))
            naive.append((key, number, made))
        order = [entry[2] for entry in sorted(naive, key=lambda entry: entry[:2])]
        assert line.first() is (order[0] if order else None)
        assert line.behind_first(ahead) == order[1 : 1 + ahead]


def test_a_session_cannot_save_up_service() -> None:
    line = RequestQueue(FairShare())
    for number in range(3):
        line.push(request(number, "busy"), (float(number),))
    line.charge(request(0, "busy"), 1000)
    served = line.first()
    assert served is not None
    line.serve(served)
    line.push(request(7, "back"), (7.0,))
    line.charge(request(7, "back"), 1)
    head = line.first()
    assert head is not None
    assert (
        head.session == "busy"
    )  # the one that came back starts level with it, and has had one token more


KEYS: list[tuple[Order, Request, Request]] = [
    (FirstCome(), request(1), request(2)),
    (ShortestPrompt(), request(2, prompt=3), request(1, prompt=4)),
    (PriorityWithAgeing(arrivals_per_level=10), request(15, priority=1), request(6)),
    (PriorityWithAgeing(arrivals_per_level=10), request(6), request(17, priority=1)),
    (ShortestOutput(predictor=Oracle()), request(2, output=3), request(1, output=4)),
    (ShortestOutput(predictor=NoisyOracle(sigma=0.0)), request(2, output=3), request(1, output=4)),
    (FairShare(), request(1), request(2)),
]


@pytest.mark.parametrize(("order", "sooner", "later"), KEYS)
def test_keys(order: Order, sooner: Request, later: Request) -> None:
    class Nothing:
        def mean_output(self, cls: str | None) -> float | None:
            return None

    assert order.key(sooner, Nothing()) < order.key(later, Nothing())


def test_predictors() -> None:
    class Mean:
        def mean_output(self, cls: str | None) -> float | None:
            return {"c": 40.0}.get(cls or "")

    known = request(1, output=30)
    assert Oracle().predict(known, Mean()) == 30
    assert ClassMean().predict(known, Mean()) == 40
    noisy = NoisyOracle(sigma=0.7, seed=3)
    assert noisy.predict(known, Mean()) == noisy.predict(known, Mean()) != 30
    with pytest.raises(ValueError, match="sigma must be 0 or more, not -1"):
        NoisyOracle(sigma=-1)


def big_head(lookahead: int, max_skips: int) -> Case:
    """r0 runs; the big one does not fit beside it; small ones come one after the other."""
    policy = load_policy(f"full-kv:lookahead={lookahead},max_skips={max_skips},watermark_share=0.0")
    small = [job(f"s{n}", 4, 4, arrival_ns=2000 * n) for n in range(1, 20)]
    limits = SchedulerLimits(
        num_blocks=12, block_size=4, max_batched_tokens=64, max_running=8, max_model_len=100
    )
    return Case(policy, limits, (job("r0", 4, 3), job("r1", 20, 12), job("big", 40, 2), *small))


def admissions(case: Case) -> list[str]:
    run = drive(case)
    names = {request.number: request.id for request in run.requests}
    return [names[row[2]] for row in run.of(EventKind.ADMITTED)]


def test_a_head_that_does_not_fit_blocks_the_line_without_skip_ahead() -> None:
    assert admissions(big_head(0, 16))[:3] == ["r0", "r1", "big"]


@pytest.mark.parametrize("max_skips", [1, 3])
def test_skip_ahead_passes_a_head_over_so_often_and_no_more(max_skips: int) -> None:
    order = admissions(big_head(4, max_skips))
    assert order.index("big") == 2 + max_skips
    assert order[2 : 2 + max_skips] == [f"s{n}" for n in range(1, 1 + max_skips)]


def test_who_lacks_only_this_steps_token_budget_is_next() -> None:
    """Neither the head nor the last fits; the one in between lacks this step's token budget, not
    blocks.
    """
    policy = load_policy("nano-vllm:lookahead=4")
    limits = SchedulerLimits(
        num_blocks=20, block_size=4, max_batched_tokens=16, max_running=8, max_model_len=100
    )
    house = Stage(policy, limits)
    house.submit("r", 12, 30)
    house.step()
    house.submit("now", 12, 30)
    house.submit("head", 60, 2)
    house.submit("next", 10, 2)
    house.submit("tail", 60, 2)
    assert [chunk.request.id for chunk in house.step().prefills] == ["now"]
    assert [chunk.request.id for chunk in house.step().prefills] == ["next"]


def test_ageing_lets_nobody_starve() -> None:
    """Urgent ones come for ever; the patient one is overtaken by at most `arrivals_per_level` a
    level.
    """
    policy = replace(load_policy("full-kv"), order=PriorityWithAgeing(arrivals_per_level=5))
    limits = SchedulerLimits(
        num_blocks=8, block_size=4, max_batched_tokens=64, max_running=1, max_model_len=100
    )
    jobs = [job("r", 4, 4), job("patient", 4, 4, 10)]
    jobs += [job(f"u{n}", 4, 4, 20 + 4000 * n, priority=1) for n in range(20)]
    order = admissions(Case(policy, limits, tuple(jobs)))
    assert order.index("patient") <= 6
