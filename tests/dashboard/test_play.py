"""The view Play: what was entered stays, impossible machines are refused, own models and times."""

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

pytest.importorskip("streamlit")

from tests.dashboard.cases import made, opened, words
from tests.dashboard.test_app import PATIENCE_S, button, ended, job_of, until_stopped
from zlab.dashboard.views import jobs
from zlab.dashboard.views.desk import Desks
from zlab.policies.spec import load_policy, policy_to_toml
from zlab.sim.profiles import profile_names
from zlab.sim.replay import default_limits
from zlab.sim.specs import find_gpu, find_model
from zlab.traces.recording import Recording

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 30000,
    "torch_dtype": "bfloat16",
}


def playing(monkeypatch: pytest.MonkeyPatch, root: Path | None = None, **query: str) -> AppTest:
    return opened(monkeypatch, [root or made()], view="Play", **({"most": "12"} | query))


def name_of_desk(app: AppTest) -> str:
    return str(app.session_state["desk"])


def test_what_was_entered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through other views, and through a reload: a new session of the same address."""
    app = playing(monkeypatch)
    app.number_input(key="num_blocks").set_value(77).run()
    app.selectbox(key="preset").set_value("constrained").run()
    app.number_input(key="constrained|budget|fixed|tokens").set_value(1024).run()
    app.selectbox(key="constrained|order|kind").set_value("shortest-prompt").run()
    mine = policy_to_toml(load_policy("hybrid:tokens=1024,window=32")).encode()

    def check(page: AppTest) -> None:
        assert not page.exception
        assert page.number_input(key="num_blocks").value == 77
        assert page.selectbox(key="preset").value == "constrained"
        assert page.number_input(key="constrained|budget|fixed|tokens").value == 1024
        assert page.selectbox(key="constrained|order|kind").value == "shortest-prompt"

    check(app)
    app.button_group(key="view").set_value(["Requests"]).run()
    app.button_group(key="view").set_value(["Play"]).run()
    check(app)
    check(opened(monkeypatch, [made()], view="Play", play=name_of_desk(app)))
    app.file_uploader(key="policy_file").set_value(("mine.toml", mine, "text/plain")).run()
    again = opened(monkeypatch, [made()], view="Play", play=name_of_desk(app))
    assert "Still open: `mine.toml`" in words(again)
    button(again, "Put away")
    assert "Still open" not in words(again)
    check(again)


def test_a_reload_finds_the_running_job_and_can_cancel_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    query = {"recipe": "fixed lengths", "count": "2000", "rate": "1000", "num_blocks": "64"}
    app = playing(monkeypatch, tmp_path, **query)
    monkeypatch.setattr(jobs, "replay", until_stopped)
    button(app, "Run")
    job = job_of(app)
    again = opened(monkeypatch, [tmp_path], view="Play", play=name_of_desk(app))
    assert "Running hybrid" in words(again)
    button(again, "Cancel")
    job.wait(PATIENCE_S)
    assert job.stopped
    assert "Cancelled after" in words(again.run())
    assert again.number_input(key="num_blocks").value == 64


def test_another_reader_has_a_desk_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = playing(monkeypatch), playing(monkeypatch)
    assert name_of_desk(one) != name_of_desk(other)
    one.number_input(key="num_blocks").set_value(99).run()
    assert other.run().number_input(key="num_blocks").value == 256


def test_desks_are_bounded() -> None:
    desks = Desks()
    first, desk = desks.find(None)
    assert desks.find(first)[1] is desk
    for _ in range(200):
        desks.find("unknown" + first)
    assert desks.find(first)[0] != first  # it was the oldest


def test_a_machine_that_cannot_be_is_refused_unless_it_is_pretended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    query = {"gpu": "rtx4090", "model": "qwen3-32b", "num_blocks": "64"}
    app = playing(monkeypatch, tmp_path, **query)
    assert not app.exception
    assert "64 blocks of 256 tokens do not fit on one rtx4090" in app.error[0].value
    assert "Run" not in [found.label for found in app.button]
    app.checkbox(key="pretend").set_value(True).run()
    assert "No such machine can be" in words(app)
    button(app, "Run")
    ended(app)
    assert "Done." in words(app)
    (folder,) = (tmp_path / "play").iterdir()
    assert "do not fit on one rtx4090" in Recording(folder).manifest["pretended"]
    page = opened(monkeypatch, [tmp_path], view="Occupancy", run=f"play/{folder.name}")
    assert "Pretended `64 blocks of 256 tokens do not fit" in words(page)


def test_as_many_blocks_as_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = playing(monkeypatch, tmp_path, gpu="l40s", fit="true")
    assert not app.exception
    gpu, model = find_gpu("l40s"), find_model("qwen3-8b")
    room = default_limits(gpu, model, load_policy("hybrid")).num_blocks
    assert f"{room:,} blocks of 256 tokens fit." in words(app)
    button(app, "Run")
    assert job_of(app).request.limits.num_blocks == room
    ended(app)


def test_measured_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = "h200-qwen3-8b-bfloat16"
    app = playing(monkeypatch, tmp_path)
    assert app.selectbox(key="cost").options[1:] == list(profile_names())
    app.selectbox(key="cost").set_value(profile).run()
    button(app, "Run")
    ended(app)
    (folder,) = (tmp_path / "play").iterdir()
    manifest: dict[str, Any] = Recording(folder).manifest
    assert manifest["cost"]["source"] != "roofline"
    assert manifest["plan_ahead"]
    app.selectbox(key="gpu").set_value("l40s").run()
    assert len(app.selectbox(key="cost").options) == 1
    assert not app.exception


def test_an_own_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = playing(monkeypatch, tmp_path, model="own config.json")
    assert "Upload the config.json" in words(app)
    data = json.dumps(CONFIG).encode()
    app.file_uploader(key="config_file").set_value(("config.json", data, "text/plain")).run()
    assert not app.exception
    button(app, "Run")
    assert job_of(app).request.limits.max_model_len == 30_000
    ended(app)
    (folder,) = (tmp_path / "play").iterdir()
    assert Recording(folder).manifest["model"] == "own-model"
    bad = ("config.json", b'{"architectures": ["MambaForCausalLM"]}', "text/plain")
    app.file_uploader(key="config_file").set_value(bad).run()
    assert "This cannot be run" in app.error[0].value
    assert "MambaForCausalLM" in app.error[0].value
    assert "/tmp" not in app.error[0].value
