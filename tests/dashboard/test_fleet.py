"""Replicas side by side, and a running server followed by its address."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

pytest.importorskip("streamlit")

from tests.dashboard.cases import charts, made, opened, words
from zlab.dashboard.data import Snapshot, Source, live_run
from zlab.dashboard.views import server as view
from zlab.dashboard.views.fleet import fleet_lines, fleets_of, imbalance, offsets_of, replica_row
from zlab.dashboard.views.server import (
    Followed,
    UnreachableError,
    base_of,
    drift_table,
    gates_table,
    history_of,
    lane_row,
    read_scrape,
)
from zlab.traces.recording import Recording, write_manifest


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas; the second begins two seconds later."""
    root = tmp_path_factory.mktemp("fleet")
    for number, name in enumerate(("hybrid", "full-kv")):
        target = root / "served" / f"replica-{number}" / "live"
        shutil.copytree(made() / name, target)
        manifest = Recording(target).manifest | {
            "started_unix_s": 1000.0 + 2 * number,
            "lane": {"name": "live", "share": 1.0},
        }
        write_manifest(target, manifest)
    return root


def test_a_fleet_is_at_least_two_replicas_of_one_folder() -> None:
    labels = ["a/replica-0/live", "a/replica-1/live", "a/replica-1/canary", "b/replica-0/live", "c"]
    found = fleets_of([Source(label, f"/{label}") for label in labels])
    assert {name: list(runs) for name, runs in found.items()} == {
        "a": ["replica-0/live", "replica-1/canary", "replica-1/live"]
    }
    assert list(fleets_of([Source("replica-0", ""), Source("replica-1", "")])) == ["."]


def test_replicas_are_drawn_side_by_side(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [fleet], view="Fleet")
    assert not app.exception
    assert not app.error
    assert len(charts(app)) == 2
    table = app.dataframe[0].value.set_index("recording")
    assert list(table.index) == ["replica-0/live", "replica-1/live"]
    for name, run in zip(table.index, ("hybrid", "full-kv"), strict=True):
        summary = Recording(made() / run).manifest["summary"]
        row = table.loc[name]
        assert row["output tokens"] == summary["output_tokens"]
        assert row["finished"] == summary["requests_finished"]
        assert row["preemptions"] == summary["preemptions"]
        assert row["TTFT p99, s"] == pytest.approx(summary["ttft_s"]["p99"], abs=1e-3)
        assert row["pool in use"] == pytest.approx(summary["occupancy_mean"], abs=0.02)
    assert "The replicas do not run one policy" in words(app)
    assert "an even share is 50.0%" in words(app)
    nothing = opened(monkeypatch, [made()], view="Fleet")
    assert not nothing.exception
    assert "No fleet was found" in words(nothing)


def test_lines_of_a_fleet_are_on_one_clock(fleet: Path) -> None:
    folders = {n: str(fleet / "served" / f"replica-{n}" / "live") for n in (0, 1)}
    snapshots = {str(n): Snapshot(path) for n, path in folders.items()}
    live = {name: live_run(one) for name, one in snapshots.items()}
    manifests = {name: one.recording.manifest for name, one in snapshots.items()}
    offsets = offsets_of(manifests)
    assert offsets == {"0": 0.0, "1": 2.0}
    lines = fleet_lines(live, offsets)
    for title in ("running, peak", "tokens/s, mean", "pool in use, mean"):
        for line in lines[title]:
            pool = live[line.name].pool
            assert pool is not None
            assert (
                offsets[line.name] < line.x[0] < line.x[-1] < offsets[line.name] + pool.times.last_s
            )
    for name, run in live.items():
        width = run.pool.times.last_s / 100 if run.pool is not None else 0.0
        (line,) = [one for one in lines["tokens/s, mean"] if one.name == name]
        total = float(np.sum([value for value in line.y if value is not None])) * width
        assert total == pytest.approx(int(run.steps["output_tokens"].to_numpy().sum()))
    rows = {name: replica_row(snapshots[name], live[name]) for name in live}
    assert imbalance(rows) is not None
    assert imbalance({"one": rows["0"]}) is None


PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{lane="live",model_name="m"}} 3
vllm:num_requests_running{{lane="canary",model_name="m"}} 1
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{lane="live",model_name="m"}} {tokens}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{lane="live",finished_reason="stop"}} {ended}
vllm:request_success_total{{lane="live",finished_reason="length"}} {ended}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{lane="live",le="+Inf"}} {ended}
vllm:time_to_first_token_seconds_sum{{lane="live"}} {ttft}
vllm:time_to_first_token_seconds_count{{lane="live"}} {ended}
# TYPE zlab:blocks gauge
zlab:blocks{{lane="live",state="free"}} 12
"""


def test_rates_and_means_are_of_what_was_counted_between_two_scrapes() -> None:
    before = read_scrape(PAGE.format(tokens=100, ended=10, ttft=5.0), 50.0)
    now = read_scrape(PAGE.format(tokens=400, ended=16, ttft=8.0), 60.0)
    row = lane_row(before, now, ("", "live"))
    assert row["running"] == 3
    assert row["output tokens/s"] == pytest.approx(30.0)
    assert row["ended requests/s"] == pytest.approx(1.2)  # over both reasons
    assert row["TTFT, s"] == pytest.approx(0.5)
    assert row["blocks free"] == 12
    assert lane_row(before, now, ("", "canary"))["output tokens/s"] is None
    restarted = read_scrape(PAGE.format(tokens=5, ended=1, ttft=0.1), 70.0)
    assert lane_row(now, restarted, ("", "live"))["output tokens/s"] is None


def test_drift_compares_the_first_minute_with_the_last() -> None:
    scrapes = [
        read_scrape(
            PAGE.format(tokens=0, ended=n, ttft=0.2 * min(n, 61) + 0.4 * max(n - 61, 0)), float(n)
        )
        for n in range(1, 200)
    ]
    row = drift_table(scrapes).iloc[0]
    assert row["latency"] == "TTFT, s"
    assert row["at first"] == pytest.approx(0.2)
    assert row["now"] == pytest.approx(0.4)
    assert row["change, %"] == pytest.approx((row["now"] / row["at first"] - 1) * 100)
    assert drift_table(scrapes[:30]).empty


@pytest.mark.parametrize(
    "address",
    [
        "ftp://here",
        "http://",
        "http://a:b@here",
        "http://here/path",
        "http://here?x=1",
        "a:99999",
        "",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UnreachableError):
        base_of(address)


def test_addresses() -> None:
    assert base_of(" 127.0.0.1:8000 ") == "http://127.0.0.1:8000"
    assert base_of("https://gpu.example/") == "https://gpu.example"
    assert base_of("http://[::1]:8000") == "http://[::1]:8000"


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that gives these answers and 404 for all else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/metrics")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "has neither /metrics nor /v1/policy"),
        ({"/metrics": (500, b"")}, "the server answers 500"),
        ({"/metrics": (302, b"")}, "the server answers 302"),
        ({"/metrics": (200, b"a{b")}, "/metrics cannot be read"),
        ({"/v1/policy": (401, b"")}, "asks for a key"),
        ({"/v1/policy": (200, b"[]")}, "not the answer of a server of Zipage Lab"),
        ({"/v1/policy": (200, b"[" * 100_000)}, "not valid JSON"),
        ({"/v1/policy": (200, b'{"lanes": 3}')}, None),
        ({"/v1/policy": (200, b'{"lanes": [{"lane": {"a": 1}, "share": []}, 4]}')}, None),
    ],
)
def test_odd_answers_are_said_in_words(
    answers: dict[str, tuple[int, bytes]], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(answers) as url:
        followed = Followed(url)
        followed.poll("")
        assert (followed.trouble is None) == (says is None)
        assert says is None or says in str(followed.trouble)
        if says is None:
            history_of(followed)


def test_a_server_that_is_not_there(made_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made_root], view="Server", server="http://127.0.0.1:9")
    assert not app.exception
    assert "The server does not answer" in app.error[0].value
    other = opened(monkeypatch, [made_root], view="Server", server="![x](http://a/b)")
    assert not other.exception
    assert "cannot be followed" in other.error[0].value
    assert "![x](" not in other.error[0].value
    assert "Enter the address" in words(opened(monkeypatch, [made_root], view="Server"))


@pytest.fixture(scope="module")
def made_root() -> Path:
    return made()


def test_gates_stand_beside_what_each_lane_measures() -> None:
    watch = json.loads(
        '{"gates": ["p50_ttft <= 1 s", "failed == 0"], "window_s": 60, "measured":'
        ' {"live": {"p50_ttft": 0.25, "failed": 0}, "canary": {"p50_ttft": null}}}'
    )
    table = gates_table(watch).set_index("gate")
    assert table.loc["p50_ttft <= 1 s", "live measures"] == "0.25"
    assert table.loc["failed == 0", "live measures"] == "0"
    assert table.loc["p50_ttft <= 1 s", "canary measures"] == "too little yet"
    assert gates_table({}).empty
    assert gates_table({"gates": 5, "measured": []}).empty


def test_a_real_server_is_followed(made_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.engine.server import test_auto_rollback as cases
    from tests.engine.server.server_cases import HYBRID
    from zlab.engine.server.auto_rollback import GateMonitor
    from zlab.engine.server.metrics import ServerMetrics
    from zlab.policies.gates import gates_from_list

    monkeypatch.setattr(view, "AT_MOST_EVERY_S", 0.0)
    watch = GateMonitor(
        gates_from_list(["p50_ttft <= 100 s"]), replace(cases.QUICK, min_requests=1)
    )
    metrics = ServerMetrics("tiny")
    with cases.running(watch, canary_share=0.5, metrics=metrics) as server:
        server.post("/v1/policy", cases.order(HYBRID, lane="canary"), headers=cases.ADMIN)
        app = opened(monkeypatch, [made_root], view="Server", server=server.url)
        app.text_input(key="server_key").set_value(cases.KEY).run()
        assert not app.exception
        assert not app.error, app.error[0].value
        for _ in range(6):
            cases.complete(server, max_tokens=4)
        app.run()
        lanes = app.dataframe[0].value.set_index("lane")
        assert lanes.loc["live", "policy"] == cases.PLAIN
        assert lanes.loc["canary", "policy"] == HYBRID
        assert "is on trial in the canary lane" in words(app)
        gates = next(one.value for one in app.dataframe if "gate" in one.value)
        assert gates["gate"].tolist() == ["p50_ttft <= 100 s"]
        now = next(one.value for one in app.dataframe if "waiting" in one.value)
        assert set(now["lane"]) == {"live", "canary"}
        history = next(one.value for one in app.dataframe if "before" in one.value)
        assert HYBRID in history["policy"].tolist()
        server.post("/v1/policy", cases.order(None, lane="canary"), headers=cases.ADMIN)
        app.run()
        assert not app.exception
        assert "is on trial" not in words(app)
        assert not any(cases.KEY in str(value) for value in app.query_params.values())
