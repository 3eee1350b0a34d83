import re
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

pytest.importorskip("plotly")

from dashboard.export import run_figures, write_report
from dashboard.figures.style import MAX_MARKS, num_marks
from tests.dashboard.recordings import folder
from traces.recording import FolderRecorder, Recording, RecordingError
from zlab.outcome import Command, MisuseError
from zlab.report import names_of, report

app = Typer(cls=Command)
app.command()(report)
app.command("other")(lambda: None)  # a group, as in the real command line


def test_the_page_stands_alone_and_has_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", folder("hybrid"), folder("full-kv"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output == f"2 recordings in {out}\n"
    page = out.read_text("utf-8")
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert titles[:5] == [
        "Throughput against the tail",
        "Time to first token",
        "Time per output token",
        "End to end",
        "The pools",
    ]
    assert len(titles) == 5 + 2 * 5
    assert page.count("Plotly.newPlot(") >= len(titles)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']http", page)
    assert "hybrid | full-kv" in page


def test_one_run_alone(tmp_path: Path) -> None:
    recording = Recording(folder("swapping"))
    write_report([("only", recording)], tmp_path / "report.html")
    assert "only: Who holds most" in (tmp_path / "report.html").read_text("utf-8")
    figures = run_figures(recording)
    assert len(figures) == 5
    assert all(0 < num_marks(figure) <= MAX_MARKS for figure in figures.values())


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    out = str(tmp_path / "report.html")
    none = CliRunner().invoke(app, ["report", str(tmp_path), "--out", out])
    assert none.exit_code == 1
    assert "not a recording" in none.output
    nowhere = CliRunner().invoke(app, ["report", folder("hybrid"), "--out", str(tmp_path / "no" / "where.html")])
    assert nowhere.exit_code == 2
    assert "there is no folder" in nowhere.output
    with pytest.raises(ValueError, match="different names"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = sys.modules["zlab.report"]  # the package's attribute of this name is the command
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["report", folder("hybrid"), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 2
    assert "pip install 'zipage-lab[dashboard]'" in done.output


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    FolderRecorder(tmp_path / "begun", Recording(folder("hybrid")).manifest | {"complete": False})
    assert run_figures(Recording(tmp_path / "begun")) == {}
    (tmp_path / "begun" / "events" / "00000.parquet").write_bytes(b"PAR1 rubbish")
    with pytest.raises(RecordingError, match="cannot be read"):
        write_report([("begun", Recording(tmp_path / "begun"))], tmp_path / "report.html")


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert names_of(paths) == ["a/run", "b/run", f"{tmp_path.name}/c"]
    assert names_of(paths[1:]) == ["run", "c"]
    with pytest.raises(MisuseError, match="stands twice"):
        names_of([tmp_path / "c", tmp_path / "a" / ".." / "c"])
