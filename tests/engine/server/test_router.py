"""The front of several replicas without Ray: where requests go, and what their clients see of what
goes wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.engine.server.local_fleet import Place, eventually
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.middleware import Keys

A, B = [1] * 8, [2] * 8
Story = Callable[[Place], Awaitable[None]]


def play(
    story: Story,
    num_replicas: int = 2,
    settings: ServerSettings | None = None,
    keys: Keys | None = None,
) -> None:
    async def whole() -> None:
        place = Place(num_replicas, settings, keys)
        try:
            await place.replica_set.look()
            await story(place)
        finally:
            await place.fleet.end()
        assert place.replica_set.rule.loads == dict.fromkeys(place.replica_set.rule.replicas, 0)
        assert place.front.concurrency.num_active == 0
        assert place.front._by_id == {}

    asyncio.run(whole())


def test_a_prefix_goes_where_it_has_been_and_a_new_one_elsewhere() -> None:
    async def story(place: Place) -> None:
        homes = [(await place.complete(prompt)).json["replica"] for prompt in (A, B, A, [*A, 5], B)]
        assert homes[0] != homes[1]
        assert homes == [homes[0], homes[1], homes[0], homes[0], homes[1]]
        assert place.replica_set.rule.counts.num_matched_blocks == 6

    play(story)


def test_without_sharing_only_load_decides() -> None:
    async def story(place: Place) -> None:
        place.fleet.shares_prefixes = False
        await place.replica_set.look()
        first, second = place.stream(A), place.stream(A)
        await first.until(lambda: b"data" in first.body)
        await second.until(lambda: b"data" in second.body)
        assert first.body != second.body
        for app in place.fleet.apps.values():
            app.go_on.set()
        await first.done()
        await second.done()
        assert first.body.endswith(b"[DONE]\n\n")
        assert first.complete

    play(story)


def test_a_request_whose_replica_dies_before_it_answers_is_answered_by_another() -> None:
    async def story(place: Place) -> None:
        for app in place.fleet.apps.values():
            app.silent = True
        call = place.call("POST", "/v1/completions", {"prompt": A}, {"X-Request-Id": "mine"})
        await eventually(lambda: any(app.num_asked for app in place.fleet.apps.values()))
        victim = next(id for id, app in place.fleet.apps.items() if app.num_asked)
        for app in place.fleet.apps.values():
            app.silent = False
        place.fleet.kill(victim)
        await call.done()
        assert call.status == 200
        assert call.json["replica"] == next(iter(place.fleet.apps.values())).name
        assert place.replica_set.num_lost == 1
        report = (await place.get("/health")).json
        assert report["status"] == "degraded"
        assert sorted(row["status"] for row in report["replicas"].values()) == ["gone", "ok"]

    play(story)


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    async def story(place: Place) -> None:
        call = place.stream(A)
        await call.until(lambda: b"data" in call.body)
        place.fleet.kill(next(id for id, app in place.fleet.apps.items() if app.num_asked))
        await call.done()
        assert call.complete
        assert call.status == 200
        assert b'"code":"replica_lost"' in call.body
        assert call.body.endswith(b"data: [DONE]\n\n")
        assert sum(app.num_asked for app in place.fleet.apps.values()) == 0, (
            "what was seen is not tried again"
        )

    play(story)


def test_without_any_replica_the_client_is_told_to_come_back() -> None:
    async def story(place: Place) -> None:
        for id in list(place.fleet.apps):
            place.fleet.kill(id)
        call = await place.complete(A)
        assert (call.status, call.error, call.headers["retry-after"]) == (503, "replica_lost", "2")
        call = await place.complete(A)
        assert (call.status, call.error) == (503, "no_replica")
        report = await place.get("/health")
        assert (report.status, report.json["status"]) == (503, "unhealthy")
        page = await place.get("/metrics")
        assert (page.status, b'zlab:replica_up{replica="1"} 0.0' in page.body) == (200, True)
        assert (await place.change("x")).status == 503
        await place.replica_set.look()
        place.fleet.start("0")
        await place.replica_set.look()
        assert (await place.complete(A)).status == 200

    play(story)


def test_a_client_that_leaves_is_gone_for_the_replica_too() -> None:
    async def story(place: Place) -> None:
        call = place.stream(A)
        await call.until(lambda: b"data" in call.body)
        call.leave()
        await call.done()
        await eventually(lambda: sum(app.num_left for app in place.fleet.apps.values()) == 1)
        silent = place.fleet.of("0")[1]
        silent.silent = place.fleet.of("1")[1].silent = True
        call = place.call("POST", "/v1/completions", {"prompt": B})
        await eventually(lambda: sum(app.num_asked for app in place.fleet.apps.values()) == 2)
        call.leave()
        await call.done()
        await eventually(lambda: sum(app.num_left for app in place.fleet.apps.values()) == 2)
        assert call.status is None

    play(story)


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    async def story(place: Place) -> None:
        call = place.stream(A)
        await call.until(lambda: b"data" in call.body)
        call.takes.clear()
        next(app for app in place.fleet.apps.values() if app.num_asked).go_on.set()
        await call.done()
        assert not call.complete

    play(story, settings=ServerSettings(write_timeout_s=0.5))


def test_an_id_under_way_goes_to_the_replica_that_has_it() -> None:
    async def story(place: Place) -> None:
        first = place.stream(A, request_id="same")
        await first.until(lambda: b"data" in first.body)
        calls = [place.stream(prompt, request_id="same") for prompt in (B, A, [3] * 8)]
        for call in calls:
            await call.until(lambda call=call: b"data" in call.body)  # type: ignore[misc]
            assert call.body == first.body
        for app in place.fleet.apps.values():
            app.go_on.set()
        for call in (first, *calls):
            await call.done()

    play(story, num_replicas=4)


def test_a_change_reaches_all_and_those_that_come_later_before_any_request() -> None:
    async def story(place: Place) -> None:
        for policy in ("second", "third"):
            call = await place.change(policy)
            assert call.status == 200
            assert call.json["policy"] == policy
            assert {name: row["policy"] for name, row in call.json["replicas"].items()} == {
                "0": policy,
                "1": policy,
            }
        place.fleet.kill(place.fleet.of("1")[0])
        newcomer = place.fleet.start("1")
        newcomer.refuses = 409
        await place.replica_set.look()
        assert list(place.replica_set.rule.replicas) == [place.fleet.of("0")[0]]
        assert (await place.get("/health")).json["replicas"]["1"]["reason"] == "not caught up yet"
        newcomer.refuses = 0
        await place.replica_set.look()
        assert newcomer.policy == "third"
        assert len(place.replica_set.rule.replicas) == 2
        found = (await place.get("/v1/policy")).json
        assert (found["lanes"][0]["digest"], found["agree"]) == ("third"[::-1], True)
        assert found["replicas"]["0"] == found["replicas"]["1"]

    play(story)


def policies_of(place: Place) -> dict[str, str]:
    return {app.name: app.policy for app in place.fleet.apps.values()}


def test_a_change_that_one_replica_refuses_is_taken_back_by_the_others() -> None:
    async def story(place: Place) -> None:
        await place.change("second")
        place.fleet.of("1")[1].refuses = 400
        call = await place.change("third")
        assert (call.status, call.error) == (409, "not_by_all")
        message = call.json["error"]["message"]
        assert (
            "(replica 1: 1 does not want to); done by: 0, 2, and taken back there: nothing "
            "has changed" in message
        )
        found = (await place.get("/v1/policy")).json
        assert (found["lanes"][0]["digest"], found["agree"]) == ("second"[::-1], True)
        assert policies_of(place) == dict.fromkeys("012", "second")
        for name in "02":
            place.fleet.of(name)[1].refuses = 400
        call = await place.change("third")
        assert (call.status, call.json["error"]["message"]) == (400, "0 does not want to")
        place.fleet.kill(place.fleet.of("1")[0])
        newcomer = place.fleet.start("1")
        await place.replica_set.look()
        assert newcomer.policy == "second", "what was not done by all is not done again"

    play(story, num_replicas=3)


def test_a_change_that_cannot_be_taken_back_says_where() -> None:
    async def story(place: Place) -> None:
        place.fleet.of("1")[1].refuses = 400
        place.fleet.of("0")[1].keeps = True
        call = await place.change("second")
        assert (call.status, call.error) == (502, "replicas_disagree")
        message = call.json["error"]["message"]
        assert "replica 1: 1 does not want to" in message
        assert (
            "done by: 0, 2; it could not be taken back everywhere (replica 0: 0 is busy)" in message
        )
        assert policies_of(place) == {"0": "second", "1": "first", "2": "first"}
        found = (await place.get("/v1/policy")).json
        assert (found["lanes"][0]["digest"], found["agree"]) == (None, False), (
            "nobody is told of one for all"
        )

    play(story, num_replicas=3)


def test_a_change_during_which_a_replica_dies_is_undone_but_may_leave_something() -> None:
    async def story(place: Place) -> None:
        id, app = place.fleet.of("1")
        app.dies = lambda: place.fleet.kill(id)
        call = await place.change("second")
        assert (call.status, call.error) == (502, "replicas_disagree")
        message = call.json["error"]["message"]
        assert "(replica 1: RemoteProtocolError); done by: 0, and taken back there" in message
        assert "nothing has changed" not in call.json["error"]["message"]
        place.fleet.start("1")
        await place.replica_set.look()
        assert policies_of(place) == {"0": "first", "1": "first"}, (
            "the newcomer and the one that had changed"
        )

    play(story)


def test_a_replica_in_trouble_is_sent_nothing() -> None:
    async def story(place: Place) -> None:
        ill = place.fleet.of("0")[0]
        place.fleet.troubles[ill] = "no step has ended for 200 s"
        await place.replica_set.look()
        for number in range(4):
            assert (await place.complete([number] * 8)).json["replica"] == "1"
        report = (await place.get("/health")).json
        assert report["replicas"]["0"]["reason"] == "no step has ended for 200 s"
        del place.fleet.troubles[ill]
        await place.replica_set.look()
        assert (await place.get("/health")).json["status"] == "ok"

    play(story)


def test_metrics_of_all_replicas_are_one_page() -> None:
    async def story(place: Place) -> None:
        for prompt in (A, B, A):
            await place.complete(prompt)
        page = (await place.get("/metrics")).body.decode()
        lines = [line for line in page.splitlines() if not line.startswith("#")]
        assert {'asked_total{replica="0"}', 'asked_total{replica="1"}'} <= {
            line.split()[0] for line in lines
        }
        assert sum(float(line.split()[1]) for line in lines if line.startswith("asked_total")) == 3
        assert "zlab:routed_requests_total 3.0" in lines
        assert "zlab:routed_matched_blocks_total 2.0" in lines
        assert 'zlab:replica_up{replica="1"} 1.0' in lines
        assert page.count("# TYPE asked_total counter") == 1
        place.fleet.kill(place.fleet.of("1")[0])
        assert (
            'zlab:replica_up{replica="1"} 0.0'
            in (await place.get("/metrics")).body.decode().splitlines()
        )

    play(story)


def test_what_is_open_at_the_end_is_called_off() -> None:
    async def story(place: Place) -> None:
        stream, silent = place.stream(A), place.stream(B)
        for app in place.fleet.apps.values():
            app.silent = app.name == "1"
        calls = [stream, silent]
        await eventually(lambda: all(app.num_asked for app in place.fleet.apps.values()))
        await eventually(lambda: any(call.body for call in calls))
        place.front.concurrency.close()
        assert (await place.get("/health")).json["status"] == "draining"
        assert (await place.complete(A)).error == "shutting_down"
        await asyncio.to_thread(place.front.worker.stop)
        for call in calls:
            await call.done()
            assert call.complete
            assert b'"code":"shutting_down"' in call.body
        assert sorted(call.status or 0 for call in calls) == [200, 503]
        await eventually(lambda: sum(app.num_left for app in place.fleet.apps.values()) == 2)

    play(story)


def test_the_front_keeps_the_door() -> None:
    async def story(place: Place) -> None:
        assert (await place.complete(A)).status == 401
        key = {"Authorization": "Bearer a-long-api-key"}
        large = place.call("POST", "/v1/completions", b" " * 2000, key)
        assert (await large.done()).status == 413
        body = {"prompt": A, "stream": True}
        first = place.call("POST", "/v1/completions", body, key)
        await first.until(lambda: b"data" in first.body)
        second = await place.call("POST", "/v1/completions", body, key).done()
        assert (second.status, second.headers["retry-after"]) == (429, "2")
        first.leave()
        await first.done()

    play(
        story,
        settings=ServerSettings(max_body_bytes=1000, max_concurrent=1),
        keys=Keys.of(["a-long-api-key"]),
    )


def test_an_answer_that_its_application_breaks_off_ends_with_an_error() -> None:
    async def story(place: Place) -> None:
        call = place.stream(A, breaks=True)
        await call.until(lambda: b"data" in call.body)
        for app in place.fleet.apps.values():
            app.go_on.set()
        await call.done()
        assert b'"code":"replica_lost"' in call.body
        assert call.body.endswith(b"data: [DONE]\n\n")
        assert (await place.complete(A)).status == 200

    play(story)


def test_what_an_application_cannot_answer_is_an_error_of_the_server() -> None:
    async def story(place: Place) -> None:
        call = await place.complete(A, fail=True)
        assert (call.status, call.error) == (500, "internal_error")
        assert len(place.replica_set.rule.replicas) == 2
        assert (await place.complete(A)).status == 200
        assert (await place.get("/v1/models")).json == {"model": "small"}
        assert (await place.get("/nothing")).status == 404

    play(story)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": {"a": 1}}', b'{"prompt": [], "n": "x"}', b'{"n": -4}']
)
def test_a_body_that_makes_no_sense_is_left_to_a_replica(body: bytes) -> None:
    async def story(place: Place) -> None:
        call = await place.call("POST", "/v1/completions", body).done()
        assert call.status in (200, 500)
        assert sum(app.num_asked for app in place.fleet.apps.values()) == 1

    play(story)
