"""The house keeps its own rules, and each rule is seen to report a planted fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import house_rules
from tests.house_rules import OUTSIDE, ROOMS
from tests.house_source import ROOT, Module, read_modules

ModuleRule = Callable[[Module], list[str]]
MODULE_RULES: tuple[ModuleRule, ...] = (
    house_rules.direction,
    house_rules.libraries,
    house_rules.core_purity,
    house_rules.import_form,
    house_rules.one_name,
    house_rules.scheduler_state,
    house_rules.policy_name,
    house_rules.lengths,
    house_rules.names,
)
LONG_BODY = "    x = 1\n" * 101

# rule, the name the source goes by, the source, words of the complaint
FAULTS: tuple[tuple[ModuleRule, str, str, str], ...] = (
    (
        house_rules.direction,
        "traces.workload",
        "from traces import reshape",
        "traces.workload may not import",
    ),
    (
        house_rules.direction,
        "traces.recording",
        "from policies.core import events",
        "policies.core.events",
    ),
    (
        house_rules.direction,
        "policies.core.plan",
        "import policies.slots",
        "policies.core may not import",
    ),
    (house_rules.direction, "policies.core.plan", "from traces import Workload", "traces.Workload"),
    (
        house_rules.direction,
        "policies.registry",
        "from traces.recording import read",
        "traces.recording.read",
    ),
    (
        house_rules.direction,
        "policies",
        "import importlib\nimportlib.import_module('sim.cost')",
        ":2: policies may",
    ),
    (
        house_rules.direction,
        "sim.simulator",
        "from engine.loop import run",
        "sim may not import engine.loop.run",
    ),
    (house_rules.direction, "engine.loop", "import sim", "engine may not import sim"),
    (
        house_rules.direction,
        "dashboard.figures",
        "from sim import cost",
        "dashboard may not import sim.cost",
    ),
    (
        house_rules.direction,
        "dashboard.views.play",
        "import zlab",
        "dashboard.views may not import zlab",
    ),
    (
        house_rules.direction,
        "zlab.main",
        "from tests.shared import SHARED",
        "zlab may not import tests",
    ),
    (house_rules.libraries, "policies.budget", "import torch", "torch only in engine/"),
    (house_rules.libraries, "policies.budget", "import simpy", "simpy only in sim/"),
    (
        house_rules.libraries,
        "policies.budget",
        "import pandas as pd",
        "pandas is no part of a base install",
    ),
    (house_rules.libraries, "engine.loop", "from simpy.events import Event", "simpy only in sim/"),
    (house_rules.libraries, "sim.cost", "def f():\n    import torch", ":2: torch only in engine/"),
    (house_rules.libraries, "dashboard.load", "import triton", "triton only in engine/"),
    (
        house_rules.libraries,
        "zlab.main",
        "import plotly.graph_objects",
        "plotly only in dashboard/",
    ),
    (house_rules.libraries, "engine.llm", "import streamlit as st", "streamlit only in dashboard/"),
    (
        house_rules.libraries,
        "engine.llm",
        "import fastapi",
        "fastapi only in engine/server/*, not in engine.llm",
    ),
    (
        house_rules.libraries,
        "zlab.serve",
        "def f():\n    import uvicorn",
        "uvicorn only in engine/server/",
    ),
    (
        house_rules.libraries,
        "engine.server.app",
        "from ray import serve",
        "ray only in engine/server/replicas*",
    ),
    (
        house_rules.core_purity,
        "policies.core.scheduler",
        "from time import monotonic",
        "may not import time",
    ),
    (house_rules.core_purity, "policies.core.blocks", "print(1)", "may not call print()"),
    (house_rules.import_form, "sim.cost", "from . import memory", "relative import"),
    (house_rules.import_form, "sim.cost", "from math import *", "import * from math"),
    (
        house_rules.import_form,
        "sim.cost",
        "def f():\n    import math",
        ":2: import of math not at the top",
    ),
    (
        house_rules.import_form,
        "sim.cost",
        "class A:\n    from math import pi",
        "import of math.pi not at the top",
    ),
    (house_rules.import_form, "sim.cost", "if x:\n    import math", "not at the top"),
    (
        house_rules.import_form,
        "sim.cost",
        "m = __import__('math')",
        "import of math not at the top",
    ),
    (
        house_rules.import_form,
        "zlab.main",
        "def f():\n    import sim",
        "import of sim not at the top",
    ),
    (
        house_rules.import_form,
        "tests.test_x",
        "import typing\nif typing.TYPE_CHECKING:\n    pass",
        "wrong floor",
    ),
    (
        house_rules.one_name,
        "sim.replay",
        "from policies.spec import load_policy",
        "import zlab.policies",
    ),
    (
        house_rules.scheduler_state,
        "sim.simulator",
        "x = self._scheduler.state.pool",
        "Scheduler.stats()",
    ),
    (
        house_rules.policy_name,
        "sim.simulator",
        "if policy.name == 'hybrid': pass",
        "asks for policy.name",
    ),
    (
        house_rules.policy_name,
        "engine.loop",
        "x = 'full-kv' != self._policy.name",
        "asks for self._policy.name",
    ),
    (
        house_rules.policy_name,
        "engine.loop",
        "match self.policy.name:\n    case 'a': pass",
        "self.policy.name",
    ),
    (house_rules.policy_name, "sim.cost", "x = table[policy.name]", "asks for policy.name"),
    (
        house_rules.policy_name,
        "sim.cost",
        "x = policy.name.startswith('h')",
        "asks for policy.name",
    ),
    (house_rules.lengths, "sim.cost", "x = 1\n" * 1025, "1025 lines, at most 1024"),
    (house_rules.lengths, "tests.test_x", "x = 1\n" * 1025, "1025 lines, at most 1024"),
    (house_rules.lengths, "sim.cost", "def f():\n" + LONG_BODY, "f has 102 lines, at most 100"),
    (
        house_rules.lengths,
        "sim.cost",
        "class A:\n  async def f(self):\n" + LONG_BODY,
        ":2: f has 102 lines",
    ),
    (
        house_rules.lengths,
        "engine.k",
        "@triton.jit\ndef f(\n a,\n b,\n):\n" + LONG_BODY,
        "f has 101 lines",
    ),
    (house_rules.names, "sim.utils", "", "module named sim.utils"),
    (house_rules.names, "sim.base_cost", "", "module named sim.base_cost"),
    (house_rules.names, "sim.cost", "class BlockManager: pass", "class BlockManager"),
    (house_rules.names, "sim.cost", "class HTTPHelper: pass", "class HTTPHelper"),
    (house_rules.names, "tests.test_x", "class _Base: pass", "class _Base"),
)

# what the same rules let pass
INNOCENT: tuple[tuple[ModuleRule, str, str], ...] = (
    (house_rules.direction, "traces.formats.azure", "from traces.workload import Workload"),
    (house_rules.direction, "policies.core.plan", "from traces.workload import TraceRequest"),
    (
        house_rules.direction,
        "sim.simulator",
        "from policies.core import scheduler\nimport traces.recording",
    ),
    (house_rules.direction, "dashboard.views.play", "from sim.simulator import simulate"),
    (house_rules.direction, "tests.test_x", "import engine.loop, sim.cost"),
    (house_rules.libraries, "sim.simulator", "import simpy, numpy, pyarrow.parquet"),
    (house_rules.libraries, "dashboard.figures", "import plotly, pandas"),
    (house_rules.libraries, "engine.server", "import fastapi"),
    (house_rules.libraries, "engine.server.replicas", "import ray"),
    (
        house_rules.libraries,
        "engine.server.replicas_actor",
        "from ray import serve\nimport fastapi",
    ),
    (house_rules.libraries, "tests.test_x", "import torch, simpy"),
    (house_rules.core_purity, "policies.slots", "import time\nprint(time)"),
    (house_rules.import_form, "zlab.main", "def bench():\n    import engine.llm"),
    (
        house_rules.import_form,
        "sim.sweep",
        "import sys\nif sys.platform != 'win32':\n    import resource",
    ),
    (house_rules.one_name, "sim.replay", "from zlab.policies.spec import load_policy"),
    (house_rules.scheduler_state, "policies.core.prefill", "y = scheduler.state"),
    (
        house_rules.policy_name,
        "sim.manifest",
        "row = {'policy': policy.name}\nlabel = f'{policy.name}'",
    ),
    (house_rules.policy_name, "zlab.main", "x = policy.name == 'hybrid'"),
    (house_rules.lengths, "sim.cost", "x = 1\n" * 1024),
    (
        house_rules.lengths,
        "sim.cost",
        'def f():\n    """' + "One.\n" * 80 + '"""\n' + "    x = 1\n" * 58,
    ),
    (
        house_rules.lengths,
        "engine.k",
        "@triton.jit(x=1)\ndef f(\n" + " a,\n" * 60 + "):\n    x = 1",
    ),
    (house_rules.names, "traces.database", "class Database: pass\nclass BasedOn: pass"),
)


@pytest.fixture(scope="module")
def house() -> list[Module]:
    """Every module of the rooms, the tests and the benchmarks, each parsed once for this file."""
    return read_modules(ROOT, ROOMS + OUTSIDE)


def test_the_walk_finds_the_house(house: list[Module]) -> None:
    found = {module.name: module.path for module in house}
    assert found["traces"] == "traces/__init__.py"
    assert found["traces.workload"] == "traces/workload.py"
    assert found["tests.test_house"] == "tests/test_house.py"


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: ModuleRule, house: list[Module]) -> None:
    assert [complaint for module in house for complaint in rule(module)] == []


def test_no_circle_of_imports(house: list[Module]) -> None:
    assert house_rules.cycles(house) == []


def test_a_class_name_has_one_meaning(house: list[Module]) -> None:
    assert house_rules.one_class_a_name(house) == []


def test_the_command_line_starts_on_a_base_install(house: list[Module]) -> None:
    assert house_rules.light_start(house) == []


def test_every_room_is_typed() -> None:
    assert house_rules.untyped_rooms(ROOT) == []


def test_readme_is_short() -> None:
    assert house_rules.long_readme(ROOT) == []


@pytest.mark.parametrize(("rule", "name", "source", "words"), FAULTS)
def test_planted_fault_is_reported(rule: ModuleRule, name: str, source: str, words: str) -> None:
    complaints = rule(Module(name, "planted.py", source))
    assert len(complaints) == 1
    assert words in complaints[0]


@pytest.mark.parametrize(("rule", "name", "source"), INNOCENT)
def test_innocent_source_passes(rule: ModuleRule, name: str, source: str) -> None:
    assert rule(Module(name, "innocent.py", source)) == []


def test_every_rule_has_a_planted_fault_and_an_innocent_twin() -> None:
    assert {rule for rule, *_ in FAULTS} == {rule for rule, *_ in INNOCENT} == set(MODULE_RULES)


def planted(**sources: str) -> list[Module]:
    """Modules by name, `__` in a keyword standing for a dot."""
    return [
        Module(name.replace("__", "."), f"{name}.py", source) for name, source in sources.items()
    ]


def test_planted_circle_is_reported() -> None:
    ring = planted(
        sim="",
        sim__a="from sim.b import f",
        sim__b="import sim.c",
        sim__c="def g():\n    import sim.a",
    )
    assert house_rules.cycles(ring) == ["circle of imports: sim.a, sim.b, sim.c"]
    chain = planted(
        sim="from sim.a import f",
        sim__a="from sim.b import f",
        sim__b="import sim.c",
        sim__c="import math",
    )
    assert house_rules.cycles(chain) == []
    two_rings = planted(a="import b", b="import a, c", c="import d", d="import c")
    assert house_rules.cycles(two_rings) == ["circle of imports: c, d", "circle of imports: a, b"]


def test_planted_second_class_of_a_name_is_reported() -> None:
    rooms = planted(sim__a="class Row:\n    pass", engine__b="x = 1\n\n\nclass _Row:\n    pass")
    (complaint,) = house_rules.one_class_a_name(rooms)
    assert "class Row is also defined in " in complaint
    assert house_rules.one_class_a_name(planted(sim__a="class Row:\n    pass")) == []


def test_planted_heavy_start_is_reported() -> None:
    rooms = planted(
        zlab="from sim.cost import f",
        sim__cost="",
        sim="import engine.llm",
        engine__llm="import torch",
    )
    assert house_rules.light_start(rooms) == [
        "engine__llm.py:1: torch loaded by a base install: zlab -> sim -> engine.llm"
    ]
    assert house_rules.light_start(planted(sim="")) == ["there is no package zlab to start"]
    lazy = planted(zlab="def bench():\n    import engine.llm", engine__llm="import torch")
    assert house_rules.light_start(lazy) == []


def test_planted_untyped_room_is_reported(tmp_path: Path) -> None:
    for room in ("sim", "traces"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / "traces" / "py.typed").touch()
    assert house_rules.untyped_rooms(tmp_path) == ["sim/py.typed is missing"]


def test_planted_long_readme_is_reported(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("line\n" * 121, encoding="utf-8")
    assert house_rules.long_readme(tmp_path) == ["README.md:1: 121 lines, at most 120"]
    (tmp_path / "README.md").write_text("line\n" * 120, encoding="utf-8")
    assert house_rules.long_readme(tmp_path) == []
