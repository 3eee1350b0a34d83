"""Recordings that the dashboard's tests look at, made once a process."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from sim.replay import replay
from tests.traces.small_runs import POLICIES, conversations

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
