"""Everything that may meet in one plan, at the limits of the engine, in every order that a search
comes upon.

A script is a list of things to do between steps: requests come, are aborted (in any phase, or while
a copy is in flight), stop by a token of theirs, a compression fails, another policy takes over. The
engine is real, every step of it is audited, and what is free is poisoned.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.engine_cases import GREEDY, SMALL, Watched, play, prompt, request, watched
from zlab.engine.engine import EngineRequest
from zlab.engine.sampling_params import SamplingParams
from zlab.policies.spec import load_policy
from zlab.traces.schema import EventKind, Status
from zlab.traces.workload import TraceRequest

TERMINAL = (EventKind.REFUSED, EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED)
POLICIES = (
    "full-kv",
    "full-kv:comes_back=swap",
    "nano-vllm",
    "hybrid:tokens=24,window=4",
    "hybrid:tokens=16,window=8,join=when_done,comes_back=swap",
    "hybrid:tokens=24,window=4,join=blocking,comes_back=swap",
    "constrained:tokens=24,window=6",
    "zipage:tokens=16,window=8",
)
FEWEST_TOKENS = (
    16 + SMALL.block_size
)  # cache positions that a request has, at the least, when it is compressed
DRAWN = SamplingParams(temperature=0.8, seed=5, ignore_eos=True, repetition_penalty=1.3)
ACTIONS = ("submit", "submit", "abort", "abort in flight", "fail", "policy")


@dataclass(frozen=True)
class Job:
    """One request: its prompt (two seeds share a beginning), how long it may run, how its tokens
    are drawn.
    """

    seed: int
    num_prompt: int
    output: int
    drawn: bool
    stop: int | None  # a token that ends it early

    @property
    def params(self) -> SamplingParams:
        params = DRAWN if self.drawn else GREEDY
        return params if self.stop is None else replace(params, stop_token_ids=(self.stop,))

    def asked(self, id: str) -> TraceRequest:
        ids = (*prompt(self.seed % 2, 16), *prompt(self.seed, self.num_prompt))
        asked = request(id, ids[-self.num_prompt :] if self.seed % 3 else ids, self.output)
        return asked if self.stop is None else replace(asked, output_tokens=None)


@dataclass(frozen=True)
class Act:
    """Steps to take first, what to do then, and a number that picks of what there is."""

    steps: int
    what: str
    pick: int


jobs = st.builds(
    Job,
    seed=st.integers(0, 11),
    num_prompt=st.integers(1, 30),
    output=st.integers(1, 60),
    drawn=st.booleans(),
    stop=st.one_of(st.none(), st.integers(5, 12)),
)
acts = st.builds(
    Act, steps=st.integers(0, 9), what=st.sampled_from(ACTIONS), pick=st.integers(0, 1000)
)
limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(12, 22),
        "max_running": st.integers(1, 5),
        "max_batched_tokens": st.integers(6, 64),
        "host_blocks": st.sampled_from([0, 3, 9, 40]),
        "overlap": st.booleans(),
    }
)


@cache
def alone(job: Job, policy: str) -> list[int]:
    """What the job gets when nothing else is there and nothing is scarce."""
    (tokens,) = play([job.asked("alone")], policy, job.params, num_blocks=200).tokens().values()
    return tokens


class Script:
    """One engine and what happens to it."""

    def __init__(self, policies: list[str], sizes: dict[str, Any]) -> None:
        self.policies = policies
        self.run = watched(policies[0], may_become=tuple(policies[1:]), **sizes)
        self.jobs: dict[str, Job] = {}
        self.ends: list[str] = []
        self.closings: dict[str, int] = {}
        self.changed = self.failing = False

    def submit(self, job: Job) -> None:
        id = f"r{len(self.jobs)}"
        self.jobs[id], self.closings[id] = job, 0
        self.run.submit(job.asked(id), job.params)

    def step(self) -> bool:
        again = self.run.step()
        self._note_ends()
        return again

    def act(self, act: Act, waiting: list[Job]) -> None:
        for _ in range(act.steps):
            self.step()
        if act.what == "submit":
            if waiting:
                self.submit(waiting.pop())
        elif act.what == "abort":
            self._abort(self._live(), act.pick)
        elif act.what == "abort in flight":
            for _ in range(60):
                if found := [sequence for sequence in self._live() if sequence.request.in_flight]:
                    self._abort(found, act.pick)
                    return
                if not self.step():
                    return
        elif act.what == "fail":
            if self.run.engine.compression is not None:
                self.run.engine.compression.inject_failure = "injected"
                self.failing = True
        else:
            policy = self.policies[act.pick % len(self.policies)]
            self.run.engine.replace_policy(load_policy(policy))
            self.changed |= policy != self.policies[0]
            self._note_ends()

    def _live(self) -> list[EngineRequest]:
        """Those that an abort can still end."""
        return [
            s
            for s in self.run.sequences.values()
            if s.request.status is Status.LIVE and not s.request.to_abort
        ]

    def _abort(self, found: list[EngineRequest], pick: int) -> None:
        if found:
            self.run.engine.abort(found[pick % len(found)].request.id)
            self._note_ends()

    def _note_ends(self) -> None:
        loop = self.run.engine
        self.ends += [request.id for request, _ in loop.take_ended()]

    def finish(self) -> None:
        """To the end; then nothing is held, every request has ended once, and each got the tokens
        that are its own.
        """
        while self.step() or self.run.engine.scheduler.state.requests:
            assert self.run.num_steps < 5000, "there is still work"
        self.run.engine.drain()
        self._note_ends()
        self.run.assert_empty()
        assert sorted(self.ends) == sorted(self.jobs)
        assert sum(self.run.count(kind) for kind in TERMINAL) == len(self.jobs)
        for id, job in self.jobs.items():
            self._check(self.run.sequences[id], job)

    def _check(self, sequence: EngineRequest, job: Job) -> None:
        ended, got = sequence.request, sequence.output.token_ids
        assert sequence.closed
        if ended.status is Status.REFUSED:
            return
        if ended.status is Status.FAILED:
            assert ended.message == "compression failed: injected"
            assert self.failing
        compared = got
        if (
            self.changed and ended.compressions
        ):  # when it was compressed depends on when the policy changed
            expected = alone(job, "full-kv")
            compared = got[: max(FEWEST_TOKENS - ended.prompt_tokens, 0)]
        else:
            expected = alone(job, "full-kv" if self.changed else self.policies[0])
        assert compared == expected[: len(compared)], f"{ended.id} is given other tokens than alone"
        if (
            ended.status is Status.FINISHED
            and not (self.changed and ended.compressions)
            and not ended.message
        ):
            assert got == expected


def play_script(
    policies: list[str], sizes: dict[str, Any], waiting: list[Job], script: list[Act]
) -> Watched:
    stage = Script(policies, sizes)
    for _ in range(min(len(waiting), 4)):
        stage.submit(waiting.pop())
    for act in script:
        stage.act(act, waiting)
    stage.finish()
    return stage.run


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3, unique=True),
    sizes=limits,
    waiting=st.lists(jobs, min_size=2, max_size=10),
    script=st.lists(acts, max_size=12),
)
def test_whatever_meets_in_one_plan(
    policies: list[str], sizes: dict[str, Any], waiting: list[Job], script: list[Act]
) -> None:
    play_script(policies, sizes, waiting, script)
