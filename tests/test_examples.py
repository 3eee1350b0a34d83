"""The examples of the documentation run as they stand."""

import re
import runpy

import pytest

from tests.house_source import ROOT


def test_replay_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs/examples/replay.py"
    body = [
        line
        for line in path.read_text().split('"""')[2].splitlines()
        if line and not line.startswith(("from", "import"))
    ]
    assert len(body) <= 10
    names = runpy.run_path(str(path))
    shown = capsys.readouterr().out
    speeds = [float(text) for text in re.findall(r": ([\d.]+) requests/s", shown)]
    assert len(speeds) == 2
    assert speeds[1] > speeds[0]
    run = names["run"]
    assert run.requests.num_rows == len(names["workload"])
    html = run._repr_html_()
    assert "tokens_per_s" in html
    assert "<th>p99</th>" in html
    assert html.count("<table>") == html.count("</table>") == 2
