"""The house rules as pure functions over parsed sources: what may import what, how long, under
which names.

A rule reads a syntax tree, so it also holds for a file that cannot be imported here (no torch, no
GPU). It takes a `Module` and returns its complaints, each "path:line: what is wrong"; the rules on
the whole house take all modules. `tests/test_house.py` runs them all and plants a fault for each.
"""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.house_source import ROOT, Module, base_libraries, edges_between, is_under

ROOMS = ("traces", "policies", "sim", "engine", "dashboard", "zlab")
OUTSIDE = ("benchmarks", "tests")  # they may look into every room; no room may look at them
BASE_ROOMS = ("traces", "policies", "sim", "zlab")  # run on a base install
BASE_LIBRARIES = base_libraries(ROOT)

# Who may import what of the house. The longest matching name on the left counts; one on the right
# opens all below it.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "traces.workload": ("traces.schema", "traces.choices"),
    "traces.schema": (),
    "traces.choices": (),
    "traces": ("traces",),
    "policies.core": ("traces.workload", "traces.schema", "traces.choices", "policies.core"),
    "policies": ("traces.workload", "traces.schema", "traces.choices", "policies"),
    "sim": ("traces", "policies", "sim"),
    "engine": ("traces", "policies", "sim.specs", "sim.memory", "engine"),
    "dashboard": ("traces", "dashboard"),
    "dashboard.views": ("traces", "policies", "sim", "engine", "dashboard"),
    "zlab": ROOMS,
}
# Where a heavy library may be imported: a pattern over module names with slashes.
LIBRARY_HOME: Mapping[str, str] = {
    "simpy": "sim/*",
    "torch": "engine/*",
    "triton": "engine/*",
    "transformers": "engine/*",
    "safetensors": "engine/*",
    "gguf": "engine/*",
    "accelerate": "engine/*",
    "fastapi": "engine/server/*",
    "starlette": "engine/server/*",
    "uvicorn": "engine/server/*",
    "prometheus_client": "*/server/*",
    "ray": "engine/server/replicas*",
    "streamlit": "dashboard/*",
    "plotly": "dashboard/*",
}
# The core has no clock, no loop, no tensor and does no I/O: neither these modules nor these
# built-ins.
CORE_MODULES_BARRED = frozenset(
    {
        "time",
        "datetime",
        "asyncio",
        "threading",
        "multiprocessing",
        "concurrent",
        "subprocess",
        "socket",
        "random",
    }
    | {
        "os",
        "io",
        "pathlib",
        "shutil",
        "tempfile",
        "logging",
        "sqlite3",
        "pyarrow",
        "joblib",
        "rich",
        "typer",
    }
)
CORE_CALLS_BARRED = frozenset({"open", "print", "input"})

MAX_FILE_LINES = 1024
MAX_README_LINES = 120
MAX_FUNCTION_LINES = 100  # without the docstring: a contract may take the words it needs
CLASS_WORDS_BARRED = frozenset({"Manager", "Helper", "Helpers", "Base", "Util", "Utils"})
MODULE_WORDS_BARRED = frozenset(word.lower() for word in CLASS_WORDS_BARRED)


def direction(module: Module) -> list[str]:
    """A room imports only from the rooms below it (house.md, Direction 1)."""
    owner = max((name for name in MAY_IMPORT if is_under(module.name, name)), key=len, default=None)
    if owner is None:
        return []
    allowed = MAY_IMPORT[owner]
    return [
        module.at(
            found.line,
            f"{owner} may not import {found.target}; allowed: {', '.join(allowed) or 'nothing'}",
        )
        for found in module.imports
        if found.root in ROOMS + OUTSIDE
        and not any(is_under(found.target, name) for name in allowed)
    ]


def _in_base_install(root: str) -> bool:
    return root in sys.stdlib_module_names or root in BASE_LIBRARIES or root in ROOMS


def libraries(module: Module) -> list[str]:
    """A heavy library stays in its one place; a base room uses the standard library and the base
    install only.
    """
    complaints = []
    place = module.name.replace(".", "/") + "/"  # a room's own file, `__init__.py`, lies in it
    for found in module.imports:
        home = LIBRARY_HOME.get(found.root)
        if home is not None and module.room in ROOMS and not fnmatchcase(place, home):
            complaints.append(
                module.at(found.line, f"{found.root} only in {home}, not in {module.name}")
            )
        elif home is None and module.room in BASE_ROOMS and not _in_base_install(found.root):
            complaints.append(module.at(found.line, f"{found.root} is no part of a base install"))
    return complaints


def core_purity(module: Module) -> list[str]:
    """`policies.core` has no clock, no loop and does no I/O."""
    if not is_under(module.name, "policies.core"):
        return []
    imported = [
        module.at(
            found.line, f"policies.core may not import {found.root}: no clock, no loop, no I/O"
        )
        for found in module.imports
        if found.root in CORE_MODULES_BARRED
    ]
    called = [
        module.at(node.lineno, f"policies.core may not call {node.func.id}(): no I/O")
        for node in module.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in CORE_CALLS_BARRED
    ]
    return imported + called


def import_form(module: Module) -> list[str]:
    """Imports stand at the top, are absolute, without a star and without TYPE_CHECKING.

    Only `zlab` may load the rooms that need an extra, and its own commands on them, inside a
    function.
    """
    complaints = []
    for found in module.imports:
        if found.level > 0:
            complaints.append(module.at(found.line, f"relative import of {found.target}"))
        if found.target.endswith("*"):
            complaints.append(
                module.at(found.line, f"import * from {found.target.removesuffix('.*')}")
            )
        is_lazy = module.name == "zlab"  # each public name is imported when it is first used
        may_wait = module.room == "zlab" and found.root in ("engine", "dashboard", "zlab")
        if not found.at_top and not (may_wait or is_lazy) and module.room != "tests":
            complaints.append(module.at(found.line, f"import of {found.target} not at the top"))
    for node in module.nodes:
        match node:
            case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                complaints.append(
                    module.at(node.lineno, "TYPE_CHECKING: this file is on the wrong floor")
                )
    return complaints


def one_name(module: Module) -> list[str]:
    """A room is imported as `zlab.ROOM`, so that a module has one name in a process."""
    return [
        module.at(found.line, f"import zlab.{found.target}, the installed name, not {found.target}")
        for found in module.imports
        if found.root in ROOMS and found.root != "zlab" and not found.installed_name
    ]


def scheduler_state(module: Module) -> list[str]:
    """Only `policies.core` and tests read the scheduler's state; drivers use its interface."""
    if module.room not in (*ROOMS, "benchmarks") or is_under(module.name, "policies.core"):
        return []
    return [
        module.at(node.lineno, f"reads {ast.unparse(node)}: use Scheduler.stats() and its methods")
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and node.attr == "state"
        and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "scheduler"
    ]


def policy_name(module: Module) -> list[str]:
    """The simulator and the engine decide nothing by a policy's name; writing it down is no
    decision.
    """
    if module.room not in ("sim", "engine"):
        return []
    complaints = []
    for node in module.nodes:
        asked: list[ast.expr] = []
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.Match():
                asked = [node.subject]
            case ast.Subscript():
                asked = [node.slice]
            case ast.Call(func=ast.Attribute(value=owner)):
                asked = [owner]
        complaints += [
            module.at(e.lineno, f"asks for {ast.unparse(e)}") for e in asked if _is_policy_name(e)
        ]
    return complaints


def _is_policy_name(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr="name", value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return owner.lstrip("_") == "policy"
    return False


def lengths(module: Module) -> list[str]:
    """A file has at most 1024 lines (aim 600); outside tests, a function at most 100 without its
    docstring (aim 40).
    """
    complaints = []
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_FILE_LINES:
        complaints.append(
            module.at(1, f"{num_lines} lines, at most {MAX_FILE_LINES}: split by noun")
        )
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and module.room != "tests":
            num_lines = _function_lines(node)
            if num_lines > MAX_FUNCTION_LINES:
                complaint = (
                    f"{node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}: split it"
                )
                complaints.append(module.at(node.lineno, complaint))
    return complaints


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring and, for a GPU kernel, without its parameters: pointers and
    strides, one a line.
    """
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    first_line = node.body[0].lineno if is_kernel else node.lineno
    num_doc_lines = _line_count(node.body[0]) if ast.get_docstring(node) else 0
    return (node.end_lineno or node.lineno) - first_line + 1 - num_doc_lines


def _line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def names(module: Module) -> list[str]:
    """No Manager, Helper, Base or utils in the name of a class or a module."""
    complaints = []
    barred = MODULE_WORDS_BARRED.intersection(re.split(r"[._]", module.name))
    if barred:
        complaints.append(
            module.at(1, f"module named {module.name}: say what it is, not {sorted(barred)}")
        )
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            barred = CLASS_WORDS_BARRED.intersection(
                re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", node.name)
            )
            if barred:
                complaints.append(
                    module.at(
                        node.lineno, f"class {node.name}: say what it is, not {sorted(barred)}"
                    )
                )
    return complaints


def one_class_a_name(modules: Sequence[Module]) -> list[str]:
    """A class name is defined once in the rooms; a leading underscore does not count."""
    defined: dict[str, list[str]] = {}
    for module in modules:
        if module.room in ROOMS:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    place = f"{module.path}:{node.lineno}"
                    defined.setdefault(node.name.lstrip("_"), []).append(place)
    return [
        f"{places[-1]}: class {name} is also defined in {', '.join(places[:-1])}"
        for name, places in defined.items()
        if len(places) > 1
    ]


def cycles(modules: Sequence[Module]) -> list[str]:
    """Modules that import each other in a circle: the strongly connected components of more than
    one (Tarjan 1972).
    """
    edges = edges_between(modules)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    complaints: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            component, stack[start:] = stack[start:], []
            if len(component) > 1:
                complaints.append("circle of imports: " + ", ".join(sorted(component)))

    for name in edges:
        if name not in index:
            visit(name)
    return complaints


def light_start(modules: Sequence[Module]) -> list[str]:
    """`import zlab` reaches nothing at its top that a base install lacks, directly or through other
    modules.
    """
    by_name = {module.name: module for module in modules}
    if "zlab" not in by_name:
        return ["there is no package zlab to start"]
    edges = edges_between(modules, only_top=True)
    chain_to = {"zlab": "zlab"}
    queue = ["zlab"]
    complaints: list[str] = []
    for name in queue:  # grows while it is walked
        complaints += [
            by_name[name].at(found.line, f"{found.root} loaded by a base install: {chain_to[name]}")
            for found in by_name[name].imports
            if found.at_top and not _in_base_install(found.root)
        ]
        for target in sorted(edges[name]):
            packages = [
                target[:end] for end, mark in enumerate(target) if mark == "."
            ]  # their __init__ runs too
            for reached in (*packages, target):
                if reached in by_name and reached not in chain_to:
                    chain_to[reached] = f"{chain_to[name]} -> {reached}"
                    queue.append(reached)
    return complaints


def untyped_rooms(root: Path) -> list[str]:
    """Every room that has sources carries `py.typed`, so that those who install it get its
    types.
    """
    return [
        f"{room}/py.typed is missing"
        for room in ROOMS
        if any((root / room).rglob("*.py")) and not (root / room / "py.typed").is_file()
    ]


def long_readme(root: Path) -> list[str]:
    """The README, once there is one, has at most 120 lines."""
    readme = root / "README.md"
    num_lines = len(readme.read_text(encoding="utf-8").splitlines()) if readme.is_file() else 0
    return (
        [f"README.md:1: {num_lines} lines, at most {MAX_README_LINES}"]
        if num_lines > MAX_README_LINES
        else []
    )
