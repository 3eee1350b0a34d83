"""What a policy must know of scorers, without running any: names, and what each of them needs.

A scorer ranks the tokens of a request, and a compression keeps the highest. Its code is in
`zlab.engine.scorers` and needs torch; what is here does not.

A scorer of the user's own is `FILE.py:Class`:

    from zlab.engine.scorers.interface import Scorer

    class Longest(Scorer):
        needs_queries = False

        def rate(self, tokens):
            return tokens.keys.norm(dim=-1)

Its source text is read and checked here, and never run: a simulation needs no torch. The engine
runs the text that was read, so that a stored policy and the evidence on it stay what they are when
the file changes.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from zlab.traces.choices import unknown_choice


@dataclass(frozen=True, slots=True)
class ScorerTraits:
    """What the scheduler must know of a scorer.

    Attributes:
        needs_queries: The scorer reads the queries of the observation window, so a request needs a
            query slot before it can be compressed.
        keeps_history: The scorer keeps a score for each token that a later compression reads.
        redundancy: Where the scorer looks for similar keys: in the whole "sequence", inside each
            "block", or nowhere (None).
        keeps_positions: The scorer keeps the position of each token beside its score, in the same
            word.
        recent: Number of latest tokens that are always kept under this scorer, where a compression
            keeps three times as many, else a third of what it keeps.
        settings: The numbers of `ByScore` that the scorer reads. None: a policy may set any of
            them, as in release 0.1.0.
        about: What the scorer does and where it is published.
    """

    needs_queries: bool = True
    keeps_history: bool = False
    redundancy: Literal["block", "sequence"] | None = None
    keeps_positions: bool = False
    recent: int = 0
    settings: tuple[str, ...] | None = None
    about: str = ""

    @property
    def bytes_per_token(self) -> int:
        """Device memory for a token of one layer and KV head, beside its key and value."""
        return 4 if self.keeps_history else 0


SCORERS: Mapping[str, ScorerTraits] = {
    "attention": ScorerTraits(about="attention of the window, SnapKV (arXiv 2404.14469)"),
    "attention+global": ScorerTraits(keeps_history=True, about="attention with a history, G-KV"),
    "attention+full-redundancy": ScorerTraits(
        redundancy="sequence", about="attention against similar keys, R-KV (arXiv 2505.24133)"
    ),
    "attention+global+lightning": ScorerTraits(
        keeps_history=True,
        redundancy="block",
        about="history against similar keys of a block, Zipage (arXiv 2603.08743)",
    ),
    "recent": ScorerTraits(needs_queries=False, about="the latest tokens"),
    "random": ScorerTraits(needs_queries=False, about="a control: random tokens"),
    "distinct": ScorerTraits(
        keeps_history=True,
        keeps_positions=True,
        recent=64,
        settings=("pool_size",),
        about="attention against keys that are like the average, rotation undone",
    ),
    "h2o": ScorerTraits(
        keeps_history=True, settings=(), about="summed attention, H2O (arXiv 2306.14048)"
    ),
    "keydiff": ScorerTraits(
        needs_queries=False, settings=(), about="unlike the mean key, KeyDiff (arXiv 2504.15364)"
    ),
    "knorm": ScorerTraits(
        needs_queries=False, settings=(), about="short keys, Knorm (arXiv 2406.11430)"
    ),
    "streamingllm": ScorerTraits(
        needs_queries=False,
        settings=(),
        about="four first and the latest tokens, StreamingLLM (arXiv 2309.17453)",
    ),
    "tova": ScorerTraits(settings=(), about="attention of the last query, TOVA (arXiv 2401.06104)"),
    "triattention": ScorerTraits(
        keeps_history=True,
        keeps_positions=True,
        settings=(),
        about="attention expected from the mean query at later distances, TriAttention",
    ),
}
# Published names of scorers that have had another name since release 0.1.0.
SCORER_ALIASES: Mapping[str, str] = {
    "snapkv": "attention",
    "g-kv": "attention+global",
    "r-kv": "attention+full-redundancy",
    "zipage": "attention+global+lightning",
}

OWN = "or FILE.py:Class, a scorer of one's own"
METHODS = {"rate": ("tokens",), "score": ("inputs", "kernels")}
BASE_CLASS = "Scorer"
BASE_MODULE = "zlab.engine.scorers.interface"


class OwnScorer(str):
    """The name `FILE.py:Class` of a scorer of the user's own, as it was read.

    Two are equal when their source texts are, too.

    Attributes:
        source: Text of the file.
        traits: What the class says of itself.
    """

    source: str
    traits: ScorerTraits

    @override
    def __eq__(self, other: object) -> bool:
        same = str.__eq__(self, other)
        return same is True and (not isinstance(other, OwnScorer) or self.source == other.source)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    @override
    def __hash__(self) -> int:
        return str.__hash__(self)

    def named(self, name: str) -> "OwnScorer":
        """Return the same scorer under another name."""
        other = OwnScorer(name)
        other.source, other.traits = self.source, self.traits
        return other

    @property
    def source_digest(self) -> str:
        """SHA-256 of the source text."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def is_own_scorer(name: str) -> bool:
    """Return whether the name is `FILE.py:Class`."""
    return ".py:" in name


def known_scorer(name: str) -> str:
    """Return the scorer that a policy names: the name of one that ships, or an `OwnScorer`.

    Raises ValueError with the nearest name and the choices, or with what is wrong in the file.
    """
    if isinstance(name, OwnScorer):
        return name
    if is_own_scorer(name):
        return read_own_scorer(name)
    known = SCORER_ALIASES.get(name, name)
    if known not in SCORERS:
        raise ValueError(unknown_choice("scorer", name, [*SCORERS, *SCORER_ALIASES], OWN))
    return known


def scorer_traits(name: str) -> ScorerTraits:
    """Return the traits of the scorer that a policy names. Raises ValueError as `known_scorer`."""
    known = known_scorer(name)
    return known.traits if isinstance(known, OwnScorer) else SCORERS[known]


def read_own_scorer(spec: str) -> OwnScorer:
    """Read a scorer of the user's own, `FILE.py:Class`, and check it; nothing of it is run.

    Raises ValueError where there is no such class, or where it is no scorer.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{spec}: no such file: {file}")
    source = path.read_text("utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{spec}: line {error.lineno} is not Python: {error.msg}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise ValueError(f"{spec}: {unknown_choice('class', name, classes)}")
    found = OwnScorer(spec)
    found.source, found.traits = source, _traits(spec, *_members(spec, classes, name))
    return found


def _members(
    spec: str, classes: Mapping[str, ast.ClassDef], name: str
) -> tuple[dict[str, ast.stmt], set[str]]:
    """The members of a class and of its base classes in the file, and its other base classes."""
    members: dict[str, ast.stmt] = {}
    outside: set[str] = set()
    waiting, seen = [name], set()
    while waiting:
        here = waiting.pop(0)
        if here in seen:
            continue
        seen.add(here)
        for base in classes[here].bases:
            text = ast.unparse(base)
            if text in classes:
                waiting.append(text)
            else:
                outside.add(text.rpartition(".")[2])
        for statement in classes[here].body:
            for member in _bound(statement):
                members.setdefault(member, statement)
    if not outside:
        raise ValueError(f"{spec}: a scorer is derived from {BASE_CLASS} of {BASE_MODULE}")
    return members, outside


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def _traits(spec: str, members: Mapping[str, ast.stmt], outside: set[str]) -> ScorerTraits:
    defaults = {item.name: item.default for item in fields(ScorerTraits) if item.name != "about"}
    found: dict[str, Any] = {}
    for name, statement in members.items():
        if name in METHODS:
            _check_method(spec, name, statement)
        elif name in defaults:
            found[name] = _value(spec, name, statement, defaults[name])
        elif name[0] != "_":
            known = [*METHODS, *defaults]
            raise ValueError(
                f"{spec}: {unknown_choice('member of a scorer', name, known)}; the name of a "
                "helper begins with an underscore"
            )
    if outside == {BASE_CLASS} and not METHODS.keys() & members.keys():
        raise ValueError(f"{spec}: a scorer needs the method rate(tokens)")
    if found.get("keeps_positions") and not found.get("keeps_history"):
        raise ValueError(f"{spec}: keeps_positions = True needs keeps_history = True")
    if found.get("redundancy") not in (None, "block", "sequence"):
        raise ValueError(
            f"{spec}: redundancy must be 'block', 'sequence' or None, not {found['redundancy']!r}"
        )
    return ScorerTraits(**found)


def _value(spec: str, name: str, statement: ast.stmt, default: Any) -> Any:
    """The value of a class attribute, which is written as a constant."""
    written = getattr(statement, "value", None)
    try:
        value = ast.literal_eval(written or "no value")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{spec}: {name} must be written as a constant") from error
    if name == "settings":
        is_names = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        if value is not None and not is_names:
            raise ValueError(f"{spec}: settings must be a tuple of names, not {value!r}")
    elif default is not None and (type(value) is not type(default) or value < 0):
        wanted = "True or False" if isinstance(default, bool) else "a whole number of at least 0"
        raise ValueError(f"{spec}: {name} must be {wanted}, not {value!r}")
    return value


def _check_method(spec: str, name: str, statement: ast.stmt) -> None:
    """Refuse a method that cannot be called as the engine does."""
    call = f"{name}({', '.join(METHODS[name])})"
    if not isinstance(statement, ast.FunctionDef) or any(
        isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(statement)
    ):
        raise ValueError(f"{spec}: {name} must be a plain method {call}")
    given = statement.args
    most = len(given.posonlyargs) + len(given.args) - 1  # without self
    least = most - len(given.defaults)
    wanted = len(METHODS[name])
    needs_more = any(default is None for default in given.kw_defaults)
    if least > wanted or (most < wanted and given.vararg is None) or needs_more:
        raise ValueError(
            f"{spec}: {name}({ast.unparse(given)}) cannot be called as {call} (line "
            f"{statement.lineno})"
        )
