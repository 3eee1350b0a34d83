"""The dashboard in Streamlit's own test harness: no browser, every script run for real.

Recordings that the dashboard's tests look at, made once a process.
"""

import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from streamlit.testing.v1 import AppTest

from tests.traces.cases import POLICIES, conversations
from zlab.sim.replay import replay

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "dashboard" / "streamlit_app.py"


def opened(monkeypatch: pytest.MonkeyPatch, roots: list[Path], **query: str | list[str]) -> AppTest:
    """The page for these folders and this address, drawn once."""
    monkeypatch.setattr(sys, "argv", ["streamlit_app.py", *map(str, roots)])
    app = AppTest.from_file(str(SCRIPT), default_timeout=300)
    for name, value in query.items():
        app.query_params[name] = value
    return app.run()


def words(app: AppTest) -> str:
    """All that the page says."""
    kinds = (
        app.markdown,
        app.caption,
        app.info,
        app.warning,
        app.error,
        app.success,
        app.subheader,
        app.title,
    )
    return "\n".join(str(element.value) for kind in kinds for element in kind)


def charts(app: AppTest) -> list[str]:
    """The figures of the page as JSON."""
    return [element.proto.spec for element in app.get("plotly_chart")]


NAMES = {"hybrid": POLICIES[0], "swapping": POLICIES[3], "full-kv": POLICIES[5]}


@cache
def made() -> Path:
    """A folder with a recording for each of NAMES."""
    root = Path(mkdtemp(prefix="zlab-dashboard-"))
    for name, (policy, limits) in NAMES.items():
        replay(conversations(), policy, limits=limits, out=root / name)
    return root


def folder(name: str) -> str:
    """One of them."""
    return str(made() / name)
