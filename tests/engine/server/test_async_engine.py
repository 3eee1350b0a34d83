"""Many clients at once, some of them leaving, while the policy changes: nothing is lost, doubled,
or altered.

A step that fails: its requests are told, the server goes on with a new engine, or ends and never
lies healthy.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.server.server_cases import (
    HYBRID,
    ROOMY,
    WAIT_S,
    Served,
    lettered,
    served,
    sse,
    wait_for,
)
from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.model.loader import BUNDLED_PACKAGE, load_model
from zlab.engine.server.auto_rollback import CrashNotes
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.jobs import Output
from zlab.engine.server.lanes import CANARY, LIVE, Lane, Observer, change_policy
from zlab.policies.core.plan import StuckError
from zlab.policies.core.policy import Policy
from zlab.policies.registry import DeploymentStage, PolicyRegistry, RegistryError, Target
from zlab.policies.spec import load_policy, policy_digest
from zlab.traces.schema import Phase

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 30,
    "ignore_eos": True,
    "return_token_ids": True,
}
PROMPTS = ["first", "another one", "and a third that is a little longer"]


def tokens(server: Served) -> list[list[int]]:
    answers = [server.post(COMPLETIONS, ASKED | {"prompt": prompt}) for prompt in PROMPTS]
    return [answer.json()["choices"][0]["token_ids"] for answer in answers]


def test_a_crashed_step_fails_its_requests_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served(replace(ROOMY, max_running=2)) as server:
        before = tokens(server)
        server.gate.forget()
        server.gate.close()
        streamed = server.later(
            COMPLETIONS, ASKED | {"prompt": PROMPTS[0], "stream": True, "request_id": "a"}
        )
        server.step_until(Phase.DECODE)
        whole = [
            server.later(COMPLETIONS, ASKED | {"prompt": p, "request_id": p[-1]})
            for p in PROMPTS[1:]
        ]
        server.sent(3)
        server.gate.let_through(3)  # one of them runs, one waits
        assert {request.phase for request in server.requests()} == {Phase.DECODE, Phase.QUEUED}
        server.gate.fault = StuckError("step 7: something about prompt 12345")
        server.gate.open()
        *_, error, done = sse(streamed.answer().text)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "step_failed"
        for later in whole:
            answer = later.answer()
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "step_failed"
            assert "StuckError" in answer.json()["error"]["message"]
            assert "12345" not in answer.text, "what broke may be about somebody else's prompt"
        assert server.gate.num_ended == {"a": 1, "e": 1, "r": 1}
        wait_for(lambda: server.context.worker.trouble() is None, "a new engine")
        assert tokens(server) == before
        assert server.post("/v1/nothing", {}).status_code == 404
        with server.http() as client:
            assert client.get("/health").json()["status"] == "ok"
            (lane,) = client.get("/v1/policy").json()["lanes"]
            assert lane["rebuilt"] == 1
    assert "a step of lane live failed" in caplog.text


def test_a_job_that_breaks_the_engine_as_it_is_taken_in() -> None:
    with served() as server:
        engine = server.gate.lanes[LIVE].engine

        def breaks(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room")

        engine.submit = breaks  # type: ignore[method-assign]
        answer = server.post(COMPLETIONS, ASKED | {"prompt": ["a", "b"]})
        assert answer.status_code == 500
        assert "MemoryError" in answer.json()["error"]["message"]
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 200


def test_what_the_engine_refuses_at_its_door_is_no_crash() -> None:
    with served() as server:
        lane = server.gate.lanes[LIVE]

        def refuses(*_: Any, **__: Any) -> Any:
            raise EngineError("not with me")

        submit, lane.engine.submit = lane.engine.submit, refuses  # type: ignore[method-assign]
        answer = server.post(COMPLETIONS, ASKED | {"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "not with me")
        lane.engine.submit = submit  # type: ignore[method-assign]
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 200
        assert lane.num_rebuilt == 0


def test_too_many_crashes_end_the_server() -> None:
    with served(ends_well=False) as server:
        most = server.context.worker.settings.max_crashes
        for _ in range(most + 1):
            wait_for(lambda: server.context.worker.trouble() is None, "a new engine")
            server.gate.fault = RuntimeError("again")
            assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 500
        assert_ended(server)


def test_a_lane_that_cannot_be_built_anew_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ends_well=False) as server:

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr("zlab.engine.server.lanes.Engine.create", fails)
        server.gate.fault = RuntimeError("first")
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 500
        assert_ended(server)


def assert_ended(server: Served) -> None:
    """It says that it is not well, takes nothing in any more, and ends by itself with an exit code
    that says so.
    """
    worker = server.context.worker
    wait_for(lambda: worker.state == "failed", "the worker to give up")
    assert "has failed" in (worker.trouble() or "")
    wait_for(lambda: server.process.should_exit, "the process to end")
    assert server.process.exit_code == 1
    future = worker.call(len)
    assert future.exception(WAIT_S) is not None, "nobody waits for a thread that is gone"


def test_a_crash_in_one_lane_leaves_the_other_alone() -> None:
    with served(canary_share=0.5) as server:
        ids = {LIVE: "", CANARY: ""}
        for number in range(50):
            body = ASKED | {"prompt": "a", "max_tokens": 1, "request_id": f"r{number}"}
            before = server.gate.lanes[CANARY].engine.scheduler.next_step
            server.post(COMPLETIONS, body)
            ids[
                CANARY if server.gate.lanes[CANARY].engine.scheduler.next_step > before else LIVE
            ] = f"r{number}"
            if all(ids.values()):
                break
        server.gate.forget()
        server.gate.close()
        both = {
            lane: server.later(COMPLETIONS, ASKED | {"prompt": "a", "request_id": id})
            for lane, id in ids.items()
        }
        server.sent(2)
        server.gate.let_through(4)
        wait_for(
            lambda: all(lane.busy for lane in server.gate.lanes.values()), "both lanes to work"
        )
        while server.gate.about_to_step != CANARY:
            server.gate.let_through()
        server.gate.fault = RuntimeError("canary")
        server.gate.open()
        assert both[CANARY].answer().status_code == 500
        assert both[LIVE].answer().status_code == 200
        assert [lane.num_rebuilt for lane in server.gate.lanes.values()] == [0, 1]


# a policy that crashes or hangs

BAD_ORDER = """
import time
from zlab import Order


class Bad(Order):
    \"\"\"Fails on long prompts: as a crash, in an endless loop, or in a call that cannot be
    interrupted.
    \"\"\"

    def key(self, request, stats):
        if request.num_prompt_tokens == 31:
            raise KeyError("a fault of the policy")
        while request.num_prompt_tokens == 32:
            try:
                time.sleep(0.001)
            except Exception:
                pass
        if request.num_prompt_tokens == 33:
            time.sleep(3.0)
        return (request.number,)
"""
HERE = Target("tiny", "cpu")


@contextmanager
def served_by_a_bad_policy(folder: Path, decision_s: float = 5.0) -> Iterator[Served]:
    """A server with a registry, in which a policy that fails has just gone live."""
    (folder / "bad.py").write_text(BAD_ORDER)
    bad = f"{HYBRID},order={folder / 'bad.py'}:Bad"
    registry = PolicyRegistry(folder / "registry.db")
    for name in (HYBRID, bad):
        registry.promote(load_policy(name), DeploymentStage.LIVE, HERE, "ada", "to see", force=True)
    engine = replace(ROOMY, may_become=(bad,))
    notes = CrashNotes(registry, HERE)
    limits = ServerSettings(decision_s=decision_s)
    with served(engine, limits, observers=[notes], ends_well=False) as server:
        evidence = None

        def deploy(lanes: Sequence[Lane]) -> Lane:
            return change_policy(lanes, LIVE, load_policy(bad), "promoted", evidence)

        server.context.worker.call(deploy).result(WAIT_S)
        yield server


def crash(server: Served, num_tokens: int) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, ASKED | {"prompt": "x" * num_tokens})
    assert answer.status_code == 500
    error: dict[str, Any] = answer.json()["error"]
    return error


def assert_put_back(server: Served, folder: Path, why: str) -> None:
    """The policy before decides, serves, and is live in the registry, which says why."""
    wait_for(lambda: server.context.worker.trouble() is None, "a new engine")
    with server.http() as client:
        (lane,) = client.get("/v1/policy").json()["lanes"]
    assert (lane["policy"], lane["before"]) == (load_policy(HYBRID).name, None)
    assert why in lane["why"]
    for num_tokens in (31, 32, 5):
        body = ASKED | {"prompt": "x" * num_tokens}
        assert server.post(COMPLETIONS, body).status_code == 200
    registry = PolicyRegistry(folder / "registry.db")
    wait_for(lambda: registry.history(HERE)[-1].action == "rollback", "the registry's note")
    live = registry.live(HERE)
    assert live is not None
    assert live.policy.digest == policy_digest(load_policy(HYBRID)), "a restart would crash again"
    assert why in registry.history(HERE)[-1].why
    with pytest.raises(RegistryError, match="the first that went live"):
        registry.rollback(HERE, "ada", "again")


def test_a_policy_whose_decision_raises_is_put_back_at_once(tmp_path: Path) -> None:
    with served_by_a_bad_policy(tmp_path) as server:
        error = crash(server, 31)
        assert error["code"] == "step_failed"
        assert "a fault of the policy" not in json.dumps(error)
        assert_put_back(server, tmp_path, "KeyError")
        assert server.gate.lanes[LIVE].num_rebuilt == 1


def test_a_policy_that_hangs_is_interrupted_and_put_back(tmp_path: Path) -> None:
    with served_by_a_bad_policy(tmp_path, decision_s=0.4) as server:
        later = server.later(COMPLETIONS, ASKED | {"prompt": "x" * 32})
        assert later.answer().status_code == 500
        assert_put_back(server, tmp_path, "PolicyHangError")


def test_a_policy_that_cannot_be_interrupted_ends_the_server_and_does_not_come_back(
    tmp_path: Path,
) -> None:
    with served_by_a_bad_policy(tmp_path, decision_s=0.3) as server:
        assert crash(server, 33)["code"] == "engine_failed"
        assert_ended(server)
        registry = PolicyRegistry(tmp_path / "registry.db")
        wait_for(lambda: registry.history(HERE)[-1].action == "rollback", "the registry's note")


def test_a_crash_that_is_not_of_a_decision_puts_a_policy_back_at_the_second_time(
    tmp_path: Path,
) -> None:
    with served_by_a_bad_policy(tmp_path) as server:
        for time_of in (1, 2):
            server.gate.fault = RuntimeError("of the device")
            assert crash(server, 4)["code"] == "step_failed"
            wait_for(lambda: server.context.worker.trouble() is None, "a new engine")
            with server.http() as client:
                (lane,) = client.get("/v1/policy").json()["lanes"]
            assert (lane["before"] is None) == (time_of == 2)


def test_a_candidate_that_crashes_leaves_the_live_lane_alone(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD_ORDER)
    bad = load_policy(f"{HYBRID},order={tmp_path / 'bad.py'}:Bad")
    engine = replace(ROOMY, may_become=(bad,), num_blocks=80)
    with served(engine, canary_share=0.5, ends_well=False) as server:
        server.context.worker.call(
            lambda lanes: change_policy(lanes, CANARY, bad, "to try")
        ).result()
        for number in range(40):
            body = ASKED | {"prompt": "x" * 31, "max_tokens": 1, "request_id": f"r{number}"}
            if server.post(COMPLETIONS, body).status_code == 500:
                break
        wait_for(lambda: server.context.worker.trouble() is None, "a new engine")
        with server.http() as client:
            live, canary = client.get("/v1/policy").json()["lanes"]
        assert (live["rebuilt"], canary["rebuilt"]) == (0, 1)
        assert canary["follows_live"]
        assert canary["policy"] == live["policy"]


class Clumsy(Observer):
    """Fails at the first token it sees."""

    def first_token(self, lane: Lane, output: Output) -> None:
        """Fail."""
        raise OSError("disk full")


def test_an_observer_that_fails_is_left_out_and_shown() -> None:
    with served(observers=[Clumsy()]) as server:
        for _ in range(2):
            assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 200
        with server.http() as client:
            assert client.get("/health").json()["observers_failed"] == ["Clumsy: OSError"]


def test_a_step_without_end_is_not_healthy() -> None:
    with served(settings=ServerSettings(stall_s=0.05)) as server, server.http() as client:
        server.gate.close()
        later = server.later(COMPLETIONS, ASKED | {"prompt": "a"})
        wait_for(lambda: client.get("/health").status_code == 503, "the stall to be seen")
        assert "no step has ended" in client.get("/health").json()["reason"]
        server.gate.open()
        assert later.answer().status_code == 200
        wait_for(lambda: client.get("/health").status_code == 200, "all well again")


def test_an_idle_engine_sleeps() -> None:
    with served() as server, server.http() as client:
        server.post(COMPLETIONS, ASKED | {"prompt": "a"})
        server.gate.until_idle()
        before = server.gate.num_idle
        for _ in range(20):
            assert client.get("/health").status_code == 200
        assert server.gate.num_idle <= before + 1, "nothing but what was on its way has woken it"


def test_a_failing_call_is_its_callers_alone() -> None:
    with served() as server:

        def fails(lanes: Sequence[Lane]) -> None:
            raise KeyError(len(lanes))

        future = server.context.worker.call(fails)
        assert isinstance(future.exception(WAIT_S), KeyError)
        assert server.context.worker.trouble() is None


# None of them gives up a token at the lengths of these tests, so that outputs can be set against a
# quiet run.
SMALL_POLICIES = (
    "full-kv",
    "hybrid:tokens=48,window=4",
    "full-kv:order=shortest-prompt",
    "constrained:tokens=48,window=4",
)
SOAK_POLICIES = (
    "full-kv",
    "hybrid:tokens=192",
    "full-kv:order=shortest-prompt",
    "constrained:tokens=192",
)
CANCELLED = 0.2  # share of the requests whose client leaves


@dataclass
class Tally:
    """What the clients have seen."""

    wanted: list[list[int]]  # tokens of each prompt in a quiet run
    prompts: list[list[int]]
    num_tokens: int
    rng: random.Random
    finished: list[str] = field(default_factory=list)  # ids
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def body(self, number: int) -> dict[str, Any]:
        """A greedy request of fixed length for one of the prompts."""
        return {
            "prompt": self.prompts[number],
            "max_tokens": self.num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def quiet(server: Served, tally: Tally) -> None:
    """Every prompt by itself, one after the other."""
    for number in range(len(tally.prompts)):
        answer = server.post(COMPLETIONS, tally.body(number))
        tally.wanted.append(answer.json()["choices"][0]["token_ids"])
    server.assert_all_free()
    server.gate.forget()


async def one(client: httpx.AsyncClient, tally: Tally, id: str) -> None:
    """A request: streamed or not, to its end or not."""
    number = tally.rng.randrange(len(tally.prompts))
    streamed = tally.rng.random() < 0.5
    leaves = tally.rng.random() < CANCELLED
    patience = tally.rng.random()  # of what a whole answer takes, roughly
    body = tally.body(number) | {"request_id": id, "stream": streamed}
    if not streamed:
        try:
            async with asyncio.timeout(patience * 0.2 if leaves else None):
                answer = await client.post(COMPLETIONS, json=body)
        except TimeoutError:
            tally.left.append(id)
            return
        tally.statuses[answer.status_code] += 1
        note(tally, id, number, answer.json()["choices"][0]["token_ids"])
        return
    most_chunks = int(patience * tally.num_tokens) if leaves else None
    tokens: list[int] = []
    num_chunks = 0
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        tally.statuses[answer.status_code] += 1
        async for line in answer.aiter_lines():
            if most_chunks is not None and num_chunks >= most_chunks:
                tally.left.append(id)
                return
            if line.startswith("data: {"):
                num_chunks += 1
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    note(tally, id, number, tokens)


def note(tally: Tally, id: str, number: int, tokens: list[int]) -> None:
    tally.finished.append(id)
    if tokens != tally.wanted[number]:
        tally.wrong.append(f"{id}: {tokens} instead of {tally.wanted[number]}")


def swap(lanes: Sequence[Lane], policy: Policy) -> None:
    change_policy(lanes, LIVE, policy, "load")


async def load(
    server: Served, tally: Tally, num_clients: int, num_each: int, for_s: float, every: float
) -> int:
    """So many clients with `num_each` requests each, or for so long; the policy changes every
    `every` endings (or seconds). Returns how often it has changed.
    """
    policies = [load_policy(name) for name in server.context.worker.call(_names).result()]
    ends_at = time.monotonic() + for_s
    changes = 0
    running = True

    async def client_of(number: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            turn = 0
            while (turn < num_each) if num_each else (time.monotonic() < ends_at):
                await one(client, tally, f"c{number}-{turn}")
                turn += 1

    async def swapping() -> None:
        nonlocal changes
        last = 0.0
        while running:
            now = time.monotonic() if for_s else float(len(server.gate.num_ended))
            if now - last >= every:
                last = now
                changes += 1
                policy = policies[changes % len(policies)]
                await server.context.call_engine(partial(swap, policy=policy))
            await asyncio.sleep(0.005)

    swapper = asyncio.create_task(swapping())
    await asyncio.gather(*(client_of(number) for number in range(num_clients)))
    running = False
    await swapper
    return changes


def _names(lanes: Sequence[Lane]) -> list[str]:
    settings = lanes[0].engine.settings
    return [name for name in settings.may_become if isinstance(name, str)]


def check(server: Served, tally: Tally, changes: int) -> None:
    """No id twice, none lost; all is free; what was finished is what a quiet run gives."""
    server.assert_all_free()
    assert not tally.wrong, tally.wrong[:3]
    assert set(tally.statuses) == {200}
    assert tally.finished
    assert tally.left
    assert changes > 1
    ended = server.gate.num_ended
    assert set(ended.values()) == {1}
    assert set(tally.finished) <= set(ended), "a finished request that the engine never ended"
    assert set(ended) <= set(tally.finished) | set(tally.left), "an id that nobody asked for"
    for id in tally.finished:
        assert server.gate.reasons[id] == "length"
    for id in set(ended) & set(tally.left):
        assert server.gate.reasons[id] in (
            "abort",
            "length",
        )  # it may have been done before that was known


def tally_of(num_prompts: int, num_tokens: int, vocabulary: int, longest: int) -> Tally:
    rng = random.Random(7)
    shared = [rng.randrange(5, vocabulary) for _ in range(longest // 2)]
    prompts = []
    for place in range(num_prompts):
        own = [rng.randrange(5, vocabulary) for _ in range(rng.randrange(2, longest // 2))]
        prompts.append(shared + own if place % 2 else own)
    return Tally([], prompts, num_tokens, rng)


def test_a_small_load() -> None:
    engine = replace(ROOMY, policy=SMALL_POLICIES[0], may_become=SMALL_POLICIES)
    tally = tally_of(num_prompts=8, num_tokens=20, vocabulary=96, longest=20)
    with served(engine, loaded=lettered()) as server:
        quiet(server, tally)
        changes = asyncio.run(load(server, tally, num_clients=10, num_each=5, for_s=0.0, every=6))
        check(server, tally, changes)
        assert len(tally.finished) + len(tally.left) == 50


@pytest.mark.soak
def test_soak() -> None:
    """200 clients for 2 minutes on SmolLM2, a fifth of the requests given up, another policy every
    10 s.
    """
    if find_spec(BUNDLED_PACKAGE) is None:
        pytest.skip(f"{BUNDLED_PACKAGE} is not installed")
    num_clients = int(os.environ.get("ZLAB_SOAK_CLIENTS", "200"))
    seconds = float(os.environ.get("ZLAB_SOAK_SECONDS", "120"))
    engine = EngineSettings(
        model="smollm2",
        policy=SOAK_POLICIES[0],
        may_become=SOAK_POLICIES,
        device="cpu",
        num_blocks=600,
        block_size=16,
        max_model_len=128,
        max_running=64,
        max_batched_tokens=512,
    )
    tally = tally_of(num_prompts=16, num_tokens=12, vocabulary=49_000, longest=48)
    began = time.monotonic()
    with served(
        engine, ServerSettings(request_timeout_s=3600.0), loaded=load_model("smollm2")
    ) as server:
        quiet(server, tally)
        first_step = server.gate.lanes[LIVE].engine.scheduler.next_step
        changes = asyncio.run(
            load(server, tally, num_clients, num_each=0, for_s=seconds, every=10.0)
        )
        check(server, tally, changes)
        steps = server.gate.lanes[LIVE].engine.scheduler.next_step - first_step
        reasons = Counter(server.gate.reasons[id] for id in server.gate.num_ended)
        print(
            f"\nsoak: {num_clients} clients, {len(tally.finished)} requests finished, "
            f"{len(tally.left)} given up, "
            f"{dict(reasons)} in the engine, {changes} policy changes, {steps} steps, "
            f"{sum(server.gate.num_tokens.values())} tokens, {time.monotonic() - began:.0f} "
            f"s in all"
        )
