"""The sources of the house as parsed text: modules, and what each of them imports. Nothing is
imported to find out.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

INSTALLED_AS = re.compile(r"^zlab\.(?=(traces|policies|sim|engine|dashboard)(\.|$))")


@dataclass(frozen=True)
class Import:
    """One imported name; `target` is dotted and, for `from a import b`, reads `a.b`, be `b` a
    module or not.
    """

    target: str
    line: int
    level: int  # number of leading dots
    installed_name: bool  # a room is imported under its installed name, zlab.ROOM
    at_top: bool  # in the module's body, or there under try/except or a test of the platform

    @property
    def root(self) -> str:
        """The first part: the room or the library."""
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file under its dotted name; a package's `__init__.py` goes by the package's
    name.
    """

    name: str
    path: str
    source: str

    @property
    def room(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; a `SyntaxError` names the file."""
        return ast.parse(self.source, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the syntax tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything imported, also by `import_module` or `__import__` with a name written out."""
        return tuple(_imports_in(self.tree, at_top=True))

    @property
    def import_nodes(self) -> Iterator[ast.Import | ast.ImportFrom]:
        """Every import statement."""
        return (node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom))

    def at(self, line: int, complaint: str) -> str:
        """One complaint with its place."""
        return f"{self.path}:{line}: {complaint}"


def _import(target: str, line: int, level: int, at_top: bool) -> Import:
    """One import, a room named without the package it installs in."""
    room = INSTALLED_AS.sub("", target)
    return Import(room, line, level, room != target, at_top)


def _imports_in(node: ast.AST, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                for alias in child.names:
                    yield _import(alias.name, child.lineno, 0, at_top)
            case ast.ImportFrom():
                for alias in child.names:
                    target = f"{child.module}.{alias.name}" if child.module else alias.name
                    yield _import(target, child.lineno, child.level, at_top)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield _import(name, child.lineno, 0, at_top=False)
        on_platform = isinstance(child, ast.If) and ast.unparse(child.test).startswith("sys.")
        yield from _imports_in(
            child, at_top and (on_platform or isinstance(child, ast.Try | ast.ExceptHandler))
        )


def read_modules(root: Path, folders: Sequence[str]) -> list[Module]:
    """Every `.py` file below `root`'s folders, in a fixed order."""
    modules = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, relative.as_posix(), path.read_text(encoding="utf-8")))
    return modules


def base_libraries(root: Path) -> frozenset[str]:
    """Import names of the base install's dependencies, as `pyproject.toml` lists them."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(
        re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_")
        for line in project["dependencies"]
    )


def is_under(name: str, package: str) -> bool:
    """Whether the dotted `name` is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def edges_between(modules: Sequence[Module], only_top: bool = False) -> dict[str, set[str]]:
    """Module -> the modules of the house that it imports, each as the longest name that is a
    file.
    """
    known = {module.name for module in modules}
    edges: dict[str, set[str]] = {name: set() for name in sorted(known)}
    for module in modules:
        for found in module.imports:
            target = found.target
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != module.name and (found.at_top or not only_top):
                edges[module.name].add(target)
    return edges
