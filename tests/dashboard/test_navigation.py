"""Move about a run, open requests, and step through it: arithmetic, and the page itself."""

import json
from typing import Any

import numpy as np
import pytest

from tests.dashboard.cases import charts, folder, made, opened, words
from zlab.dashboard.data import Snapshot, request_frame
from zlab.dashboard.views.navigation import area_statistics, moved, numbers_of_point
from zlab.dashboard.views.requests import ORDERS, alive_in
from zlab.traces.explanation import Explainer
from zlab.traces.recording import Recording
from zlab.traces.schema import EventKind

pytest.importorskip("streamlit")


@pytest.mark.parametrize(
    ("window", "zoom", "pan", "expected"),
    [
        ((2.0, 6.0), 0.5, 0.0, (3.0, 5.0)),
        ((2.0, 6.0), 2.0, 0.0, (0.0, 8.0)),
        ((2.0, 6.0), 4.0, 0.0, (0.0, 10.0)),
        ((2.0, 6.0), 1.0, 0.5, (4.0, 8.0)),
        ((8.0, 10.0), 1.0, 0.5, (8.0, 10.0)),
        ((1.0, 3.0), 1.0, -0.5, (0.0, 2.0)),
        ((0.0, 1.0), 1.0, -0.5, (0.0, 1.0)),
    ],
)
def test_a_move_stays_inside_the_run(
    window: tuple[float, float], zoom: float, pan: float, expected: tuple[float, float]
) -> None:
    assert moved(window, 10.0, zoom, pan) == expected


@pytest.mark.parametrize(
    ("point", "numbers"),
    [
        ({"y": "r17", "customdata": "3 ms"}, (17, None)),
        ({"customdata": [4]}, (4, None)),
        ({"customdata": 4, "y": 7.5}, (4, None)),
        ({"customdata": [4, 9]}, (4, 9)),
        ({"customdata": [-1, 9]}, (None, 9)),  # a block that no request owns alone
        ({"customdata": [0, 0]}, (0, 0)),
        ({"y": 7.5}, (None, None)),
        ({"y": "row"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_a_clicked_point_names_its_request_and_its_block(
    point: dict[str, Any], numbers: tuple[int | None, int | None]
) -> None:
    assert numbers_of_point(point) == numbers


def test_buttons_move_and_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(
        monkeypatch, [made()], view="Requests", run="full-kv", **{"from": "0.5", "to": "1.5"}
    )
    app.button(key="go-w").click().run()
    assert not app.exception
    assert (app.number_input(key="from").value, app.number_input(key="to").value) == (0.75, 1.25)
    app.button(key="go-d").click().run()
    assert (app.number_input(key="from").value, app.number_input(key="to").value) == (1.0, 1.5)
    app.button(key="go-back").click().run()
    app.button(key="go-back").click().run()
    assert (app.number_input(key="from").value, app.number_input(key="to").value) == (0.5, 1.5)
    assert app.button(key="go-back").disabled


def test_a_request_is_explained_and_its_steps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(folder("full-kv"))
    frame = request_frame(recording.table("requests"))
    row = frame.sort_values("waited_s", ascending=False).iloc[0].to_dict()
    app = opened(monkeypatch, [made()], view="Requests", run="full-kv", request=str(row["number"]))
    assert not app.exception
    explainer = Explainer(recording)
    assert f"r{row['number']} took" in words(app)
    events = next(one.value for one in app.dataframe if "what happened, and why" in one.value)
    assert events["what happened, and why"].tolist() == [
        line.words for line in explainer.explain(row)
    ]
    step = int(events["step"].dropna().iloc[0])
    start_s = recording.table("steps", ("start_s",))["start_s"].to_numpy()
    app.number_input(key="at").set_value(round(float(start_s[step]), 6)).run()
    assert f"Step {step:,}, " in words(app)
    app.button(key="step-2").click().run()
    assert f"Step {step + 1:,}, " in words(app)
    app.button(key="step-1").click().run()
    assert f"Step {step:,}, " in words(app)


def test_all_figures_mark_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(monkeypatch, [made()], view="Occupancy", run="full-kv", at="1.0")
    assert not app.exception
    assert len(charts(app)) == 3
    for spec in charts(app):
        lines = json.loads(spec)["layout"].get("shapes", [])
        assert any(shape.get("x0") == 1.0 for shape in lines)


def test_the_words_of_a_step_name_what_its_events_say() -> None:
    recording = Recording(folder("hybrid"))
    events = recording.table("events").to_pylist()
    explainer = Explainer(recording)
    busiest = max(
        {row["step"] for row in events if row["kind"] == EventKind.COMPRESSING},
        key=lambda step: len({row["kind"] for row in events if row["step"] == step}),
    )
    text = "\n".join(explainer.step_in_words(busiest))
    for row in events:
        if row["step"] == busiest and row["kind"] != EventKind.DECODES:
            assert EventKind(row["kind"]).meaning in text


def test_statistics_of_areas_add_up_to_the_run() -> None:
    snapshot = Snapshot(folder("hybrid"))
    summary = snapshot.summary
    last = float(snapshot.recording.table("steps", ("end_s",))["end_s"].to_numpy()[-1])
    parts = [area_statistics(snapshot, window) for window in ((0.0, last / 3), (last / 3, last))]
    for name, total in (
        ("steps that end", summary["steps"]),
        ("output tokens", summary["output_tokens"]),
        ("preemptions", summary["preemptions"]),
        ("compressions that begin", summary["compressions"]),
        ("seconds", last),
    ):
        assert sum(part[name] for part in parts) == pytest.approx(total), name


def test_orders_and_windows_count_all_that_a_request_waited() -> None:
    frame = request_frame(Recording(folder("full-kv")).table("requests"))
    assert frame["preempted_s"].max() > 0
    assert ORDERS["most preempted"][0] == "away_s"
    assert (frame["waited_s"] >= frame["queued_s"] + frame["away_s"] - 1e-9).all()
    middle = float(frame["finish_s"].median())
    kept = alive_in(frame, (middle, middle + 0.1))
    expected = (frame["arrival_s"] <= middle + 0.1) & ~(frame["finish_s"] < middle)
    assert kept["number"].tolist() == frame["number"][expected].tolist()
    assert 0 < len(kept) < len(frame)
    unfinished = frame.assign(finish_s=np.nan)
    assert len(alive_in(unfinished, (1e9, 2e9))) == len(frame)
