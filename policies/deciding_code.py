"""Which code decides under a policy: a digest of the scheduler and of the classes it is made of.

The digest covers definitions, not files. It starts at `Scheduler`, at the classes of what it is
handed, and at the class of every answer. It follows each name in them to its definition in
`zlab.policies`, as far as names lead:

    Scheduler -> SchedulerState -> BlockPool, DecodeBatch, ...      the core, under every policy
    budget "fixed" -> class Fixed -> functions blocks_of, check     what this policy uses

Of a definition the syntax tree counts, without what cannot change a decision: comments, docstrings,
layout, annotations of functions and variables, `@override`, the order of imports and definitions,
and the module in which a definition lies. Everything else counts, names included. Text is made of
the tree here, as `ast.dump` writes it differently from one version of Python to the next.
"""

import ast
import hashlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.own import OLD_MODULES, OLD_NAMES, is_own
from zlab.policies.snapshot import PolicySnapshot
from zlab.policies.spec import answer_kinds

ROOM = "zlab.policies"
PUBLIC = "zlab"  # hands out names of `ROOM`
# What a class of an installed entry point may be made of: its imports are not stored.
OPEN_TO_ALL = tuple(dict.fromkeys(OLD_MODULES.values()))
SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_ignores", "returns"})

ReadSource = Callable[[str], str | None]
Definition = tuple[str, str]  # module, name


def code_digest(policy: PolicySnapshot, read: ReadSource | None = None) -> str:
    """Return the SHA-256 of the code that decides under a policy. No class of a user's is run.

    Args:
        policy: The policy, written down. A class of the user's own counts by what it imports from
            `zlab.policies`; its own text is part of the policy's digest.
        read: Gives the source text of a module of `zlab.policies`, None where there is none. By
            default the text is that of the package that runs.
    """
    code = _installed() if read is None else _Code(read)
    roots = {(cls.__module__, cls.__name__) for cls in (Scheduler, SchedulerLimits, Policy)}
    modules: set[str] = set()
    for kind, cls in answer_kinds(tomllib.loads(policy.toml)):
        if cls is not None:
            roots.add((cls.__module__, cls.__qualname__))
        if is_own(kind):
            own = ast.parse(policy.sources.get(kind, ""))
            imported = _imports(own)
            roots.update(origin for origin in imported.values() if origin[1])
            modules.update(module for module, name in imported.values() if not name)
            modules.update(OPEN_TO_ALL if kind.startswith("entry:") else ())
    roots.update((module, name) for module in modules for name in code.names(module))
    digest = hashlib.sha256(b"zlab-deciding-code/2\n")
    for line in sorted(code.reached(roots)):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


@cache
def _installed() -> "_Code":
    """The package as it stands when it is first asked for: it is the code that runs."""
    return _Code(_read_installed)


def _read_installed(module: str) -> str | None:
    if not module.startswith(f"{ROOM}."):
        return None
    *folders, name = module.split(".")[2:]
    folder = files(ROOM).joinpath(*folders)
    for found in (folder / name / "__init__.py", folder / f"{name}.py"):
        if found.is_file():
            return found.read_text("utf-8")
    return None


class _Module:
    """The definitions of one module: normalised text, and the names each of them uses."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.imports = _imports(tree)
        self.external = _imports(tree, ours=False)
        self.defined: dict[str, list[ast.stmt]] = {}
        self.loose: list[ast.stmt] = []  # statements that bind no name: they act on what is there
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom) or _is_inert(statement):
                continue
            names = list(_bound(statement))
            for name in names:
                self.defined.setdefault(name, []).append(statement)
            if not names:
                self.loose.append(statement)


class _Code:
    """The modules of `zlab.policies`, parsed once each."""

    def __init__(self, read: ReadSource) -> None:
        self._read = read
        self._modules: dict[str, _Module | None] = {}
        self._lines: dict[Definition, tuple[list[str], list[Definition]]] = {}

    def names(self, module: str) -> list[str]:
        """Names that a module defines."""
        found = self._module(module)
        return list(found.defined) if found is not None else []

    def reached(self, roots: set[Definition]) -> set[str]:
        """Lines of every definition that the roots lead to."""
        seen: set[Definition] = set()
        waiting = sorted(roots)
        lines: set[str] = set()
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            if place not in self._lines:
                self._lines[place] = self._definition(place)
            found, leads_to = self._lines[place]
            lines.update(found)
            waiting += leads_to
        return lines

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            source = self._read(name)
            self._modules[name] = _Module(source) if source is not None else None
        return self._modules[name]

    def _definition(self, place: Definition) -> tuple[list[str], list[Definition]]:
        """Lines of one definition, and where the names in it are defined."""
        module, name = place
        if module == PUBLIC:
            return [], [(each, name) for each in OPEN_TO_ALL if name in self.names(each)]
        found = self._module(module)
        if found is None:
            return [], []
        if name not in found.defined:  # passed on from where it is defined
            return [], [found.imports[name]] if name in found.imports else []
        statements = [*found.defined[name], *found.loose]
        lines, leads_to = [], []
        for statement in filter(None, (_bare(each, in_class=False) for each in statements)):
            lines.append(f"{name} {_text(statement)}")
            for used in _names(statement):
                if used in found.defined:
                    leads_to.append((module, used))
                elif used in found.imports:
                    origin, what = found.imports[used]
                    names = [what] if what else self.names(origin)
                    leads_to += [(origin, each) for each in names]
                elif used in found.external:
                    lines.append(f"{used} is {'.'.join(filter(None, found.external[used]))}")
        return lines, leads_to


def _imports(tree: ast.AST, ours: bool = True) -> dict[str, Definition]:
    """Local name -> module and name in it (empty: the module itself), of `zlab.policies` or not.

    Names of release 0.1.0 stand for those of today. Of other rooms the name counts, not the module.
    """
    found: dict[str, Definition] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                module = item.name if item.asname else item.name.partition(".")[0]
                whole = OLD_MODULES.get(item.name, item.name)
                if _is_ours(whole) is ours:
                    found[item.asname or module] = (whole if ours else module, "")
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            module = OLD_MODULES.get(node.module, node.module)
            if _is_ours(module) is not ours:
                continue
            for item in node.names:
                name = OLD_NAMES.get(item.name, item.name) if node.module != module else item.name
                if ours and _is_module(f"{module}.{name}"):
                    found[item.asname or name] = (f"{module}.{name}", "")
                else:
                    shown = "" if module.startswith("zlab.") and not ours else module
                    found[item.asname or item.name] = (shown, name)
    return found


def _is_ours(module: str) -> bool:
    return module in (ROOM, PUBLIC) or module.startswith(f"{ROOM}.")


def _is_module(name: str) -> bool:
    return _read_installed(name) is not None


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module gives a meaning."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from _bound(part)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names(node: ast.AST) -> set[str]:
    """Names that occur in what counts of a statement."""
    found = set()
    for _, value in _counting(node):
        for child in value:
            if isinstance(child, ast.AST):
                found |= _names(child)
    return found | ({node.id} if isinstance(node, ast.Name) else set())


def _text(node: Any) -> str:
    """A syntax tree as text: kinds of nodes and what counts of their fields."""
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__}:{node!r}"
    parts = (f"{name}=[{','.join(map(_text, value))}]" for name, value in _counting(node) if value)
    return f"{type(node).__name__}({' '.join(parts)})"


def _counting(node: ast.AST) -> Iterator[tuple[str, Sequence[Any]]]:
    """The fields of a node that count, each as a list; a field that is not given is empty."""
    is_class = isinstance(node, ast.ClassDef)
    for name in node._fields:
        if name in SKIPPED_FIELDS or (name == "annotation" and isinstance(node, ast.arg)):
            continue
        value = getattr(node, name, None)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if name == "value" and isinstance(node, ast.Constant):
            values = [value]
        if name in ("body", "orelse", "finalbody"):
            values = [_bare(each, is_class) for each in values if not _is_inert(each)]
            values = [each for each in values if each is not None]
        elif name == "decorator_list":
            values = [each for each in values if not _is_override(each)]
        yield name, values


def _bare(node: Any, in_class: bool) -> Any:
    """An annotated variable without its annotation; the fields of a class keep theirs."""
    if not isinstance(node, ast.AnnAssign) or in_class:
        return node
    if node.value is None:
        return None
    return ast.Assign(targets=[node.target], value=node.value)


def _is_inert(node: Any) -> bool:
    """Whether this is a docstring, `...` or `pass`."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)


def _is_override(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "override") or (
        isinstance(node, ast.Attribute) and node.attr == "override"
    )
