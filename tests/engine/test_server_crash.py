"""A step that fails: its requests are told, the server goes on with a new engine, or ends and never lies healthy."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import EngineError
from engine.server.job import Entry
from engine.server.lanes import CANARY, LIVE, Lane
from engine.server.observing import Observer
from engine.server.settings import ServerSettings
from policies.core.errors import StuckError
from policies.core.request import Phase
from tests.engine.server_cases import ROOMY, Served, served, sse, wait_for

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ["first", "another one", "and a third that is a little longer"]


def tokens(server: Served) -> list[list[int]]:
    answers = [server.post(COMPLETIONS, ASKED | {"prompt": prompt}) for prompt in PROMPTS]
    return [answer.json()["choices"][0]["token_ids"] for answer in answers]


def test_a_crashed_step_fails_its_requests_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with served(replace(ROOMY, max_running=2)) as server:
        before = tokens(server)
        server.gate.forget()
        server.gate.close()
        streamed = server.later(COMPLETIONS, ASKED | {"prompt": PROMPTS[0], "stream": True, "request_id": "a"})
        server.step_until(Phase.DECODE)
        whole = [server.later(COMPLETIONS, ASKED | {"prompt": p, "request_id": p[-1]}) for p in PROMPTS[1:]]
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
        wait_for(lambda: server.house.worker.trouble() is None, "a new engine")
        assert tokens(server) == before
        assert server.post("/v1/nothing", {}).status_code == 404
        with server.http() as client:
            assert client.get("/health").json()["status"] == "ok"
            (lane,) = client.get("/v1/policy").json()["lanes"]
            assert lane["rebuilt"] == 1
    assert "a step of lane live failed" in caplog.text


def test_a_job_that_breaks_the_engine_as_it_is_taken_in() -> None:
    with served() as server:
        loop = server.gate.lanes[LIVE].engine.loop

        def breaks(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room")

        loop.submit = breaks  # type: ignore[method-assign]
        answer = server.post(COMPLETIONS, ASKED | {"prompt": ["a", "b"]})
        assert answer.status_code == 500
        assert "MemoryError" in answer.json()["error"]["message"]
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 200


def test_what_the_engine_refuses_at_its_door_is_no_crash() -> None:
    with served() as server:
        lane = server.gate.lanes[LIVE]

        def refuses(*_: Any, **__: Any) -> Any:
            raise EngineError("not with me")

        submit, lane.engine.loop.submit = lane.engine.loop.submit, refuses  # type: ignore[method-assign]
        answer = server.post(COMPLETIONS, ASKED | {"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "not with me")
        lane.engine.loop.submit = submit  # type: ignore[method-assign]
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 200
        assert lane.num_rebuilt == 0


def test_too_many_crashes_end_the_server() -> None:
    with served(ends_well=False) as server:
        most = server.house.worker.settings.max_crashes
        for _ in range(most + 1):
            wait_for(lambda: server.house.worker.trouble() is None, "a new engine")
            server.gate.fault = RuntimeError("again")
            assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 500
        assert_ended(server)


def test_a_lane_that_cannot_be_built_anew_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ends_well=False) as server:

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr("engine.server.lanes.build_engine", fails)
        server.gate.fault = RuntimeError("first")
        assert server.post(COMPLETIONS, ASKED | {"prompt": "a"}).status_code == 500
        assert_ended(server)


def assert_ended(server: Served) -> None:
    """It says that it is not well, takes nothing in any more, and ends by itself with an exit code that says so."""
    worker = server.house.worker
    wait_for(lambda: worker.state == "failed", "the worker to give up")
    assert "has failed" in (worker.trouble() or "")
    wait_for(lambda: server.process.should_exit, "the process to end")
    assert server.process.exit_code == 1
    future = worker.call(len)
    assert future.exception(10.0) is not None, "nobody waits for a thread that is gone"


def test_a_crash_in_one_lane_leaves_the_other_alone() -> None:
    with served(canary_share=0.5) as server:
        ids = {LIVE: "", CANARY: ""}
        for number in range(50):
            body = ASKED | {"prompt": "a", "max_tokens": 1, "request_id": f"r{number}"}
            before = server.gate.lanes[CANARY].engine.scheduler.next_step
            server.post(COMPLETIONS, body)
            ids[CANARY if server.gate.lanes[CANARY].engine.scheduler.next_step > before else LIVE] = f"r{number}"
            if all(ids.values()):
                break
        server.gate.forget()
        server.gate.close()
        both = {lane: server.later(COMPLETIONS, ASKED | {"prompt": "a", "request_id": id}) for lane, id in ids.items()}
        server.sent(2)
        server.gate.let_through(4)
        wait_for(lambda: all(lane.busy for lane in server.gate.lanes.values()), "both lanes to work")
        while server.gate.about_to_step != CANARY:
            server.gate.let_through()
        server.gate.fault = RuntimeError("canary")
        server.gate.open()
        assert both[CANARY].answer().status_code == 500
        assert both[LIVE].answer().status_code == 200
        assert [lane.num_rebuilt for lane in server.gate.lanes.values()] == [0, 1]


class Clumsy(Observer):
    """Fails at the first token it sees."""

    def first_token(self, lane: Lane, entry: Entry) -> None:
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

        future = server.house.worker.call(fails)
        assert isinstance(future.exception(10.0), KeyError)
        assert server.house.worker.trouble() is None
