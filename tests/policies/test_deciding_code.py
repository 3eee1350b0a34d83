"""The digest of the deciding code: it follows what decides, and nothing else."""

import ast
import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house_source import ROOT
from zlab.policies.deciding_code import code_digest
from zlab.policies.snapshot import PolicySnapshot, store_policy
from zlab.policies.spec import load_policy, presets

CORE = sorted(
    path.stem for path in (ROOT / "policies" / "core").glob("*.py") if path.stem != "__init__"
)
AUDIT = "invariants"
UNDECIDED = (AUDIT, "policy")  # watches the scheduler; compares only to write a policy down
OWN = """
from zlab import Order
from zlab.policies.ordering import FirstCome

class Mine(FirstCome):
    question = "order"
"""


def source(module: str) -> str | None:
    """The text of a module of the room, from the checkout."""
    found = find_spec(module)
    return None if found is None or found.origin is None else Path(found.origin).read_text("utf-8")


def stored(spec: str = "hybrid") -> PolicySnapshot:
    return store_policy(load_policy(spec))


def digest(spec: str, change: Callable[[str], str] | None = None, module: str | None = None) -> str:
    """The digest of a copy of the sources, in which all modules or one were changed."""

    def read(name: str) -> str | None:
        text = source(name)
        if text is None or change is None or (module is not None and name != module):
            return text
        return change(text)

    return code_digest(stored(spec), read)


HERE = {name: code_digest(stored(name)) for name in presets()}


def reworded(text: str) -> str:
    """Other docstrings, other comments, other layout, imports and definitions in another order."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Expr(ast.Constant("Something else is said here."))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and len(node.body) > 2:
            node.body.insert(2, ast.Expr(ast.Constant("A word in between.")))
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    imports = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    rest = [one for one in tree.body[1:] if one not in imports]
    tree.body = [tree.body[0], *reversed(imports), *reversed(rest)]
    return "# a comment\n\n\n" + ast.unparse(ast.fix_missing_locations(tree)) + "\n# the end\n"


@pytest.mark.parametrize("name", sorted(HERE))
def test_words_order_and_layout_do_not_count(name: str) -> None:
    assert digest(name) == HERE[name]
    assert digest(name, lambda text: text.replace("\n", "\r\n")) == HERE[name]
    assert digest(name, reworded) == HERE[name]


class Flip(ast.NodeTransformer):
    """Turns the comparison with that number, in order of its place, into its opposite."""

    def __init__(self, number: int) -> None:
        self.number = number

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        self.number -= 1
        if self.number == -1:
            return ast.UnaryOp(ast.Not(), node)
        return node


def flipped(text: str, number: int) -> str:
    tree = Flip(number).visit(ast.parse(text))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("module", [name for name in CORE if name not in UNDECIDED])
def test_a_comparison_of_the_core_counts(module: str) -> None:
    """The first and the last of every module."""
    name = f"zlab.policies.core.{module}"
    text = source(name)
    assert text is not None
    num_compares = sum(isinstance(node, ast.Compare) for node in ast.walk(ast.parse(text)))
    texts = [flipped(text, at) for at in {0, num_compares - 1} if num_compares]

    def with_text(other: str) -> str:
        return digest("hybrid", lambda _: other, name)

    found = {with_text(other) for other in texts}
    assert len(found - {HERE["hybrid"]}) == len(texts)


def test_the_audit_does_not_count() -> None:
    assert (
        digest("hybrid", lambda _: "raise SystemExit", f"zlab.policies.core.{AUDIT}")
        == (HERE["hybrid"])
    )


SHORTEST = "hybrid:order=shortest-output"
NOISY = f"{SHORTEST},order.predictor=noisy-oracle"
# Module, old text, new text, a policy that it is a part of, policies that it is not a part of.
OF_ONE_CLASS = (
    ("budget", "return blocks or", "return tokens or", "zipage", ("full-kv",)),
    ("budget", "block_size) + 1", "block_size)", "hybrid-adaptive", ("full-kv",)),
    ("budget", "if blocks < 0", "if blocks < -1", "hybrid", ("full-kv",)),
    ("budget", "> self.grow_above", ">= self.grow_above", "hybrid-adaptive", ("hybrid",)),
    ("preemption", "request.slot < 0", "request.slot <= 0", "hybrid", ("full-kv", "constrained")),
    ("ordering", "number - request.p", "number + request.p", "hybrid:order=priority", ("hybrid",)),
    ("ordering", "mean is None", "mean is not None", SHORTEST, ("hybrid",)),
    ("ordering", "gauss(0.0", "gauss(0.1", NOISY, ("hybrid", SHORTEST)),
    ("spec", "if not equals or", "if equals or", None, ("hybrid", "full-kv")),
    ("gates", "is_relative", "is_absolute", None, ("hybrid",)),
)


@pytest.mark.parametrize(("module", "old", "new", "used_by", "not_by"), OF_ONE_CLASS)
def test_a_class_counts_where_it_is_used(
    module: str, old: str, new: str, used_by: str | None, not_by: tuple[str, ...]
) -> None:
    name = f"zlab.policies.{module}"
    assert old in (source(name) or "")
    for spec in not_by:
        assert digest(spec, lambda text: text.replace(old, new), name) == digest(spec)
    if used_by is not None:
        assert digest(used_by, lambda text: text.replace(old, new), name) != digest(used_by)


def test_a_definition_may_move_to_another_module() -> None:
    """`blocks_of` and `check` in a module of their own: the same definitions decide."""
    text = source("zlab.policies.budget")
    assert text is not None
    tree = ast.parse(text)
    moved = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    stays = copy.deepcopy(tree)
    stays.body = [one for one in stays.body if not isinstance(one, ast.FunctionDef)]
    texts = {
        "zlab.policies.budget": "from zlab.policies.sizes import blocks_of as blocks_of, check\n"
        + ast.unparse(stays),
        "zlab.policies.sizes": "\n".join(map(ast.unparse, moved)),
    }
    moved_digest = code_digest(stored(), lambda name: texts.get(name) or source(name))
    assert moved_digest == HERE["hybrid"]
    texts["zlab.policies.sizes"] = texts["zlab.policies.sizes"].replace("+ 1", "+ 2")
    assert code_digest(stored(), lambda name: texts.get(name) or source(name)) != moved_digest


def test_a_users_class_counts_by_what_it_imports(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN, "utf-8")
    spec = f"{path}:Mine"
    here = digest(spec)
    path.write_text(OWN.replace("class Mine", "# words\nclass Mine"), "utf-8")
    assert digest(spec) == here, "its text is part of the policy's digest"
    other = lambda text: text.replace("self.lookahead < 0", "self.lookahead < 1")  # noqa: E731
    assert digest(spec, other, "zlab.policies.ordering") != here
    priority = lambda text: text.replace("- request.priority", "+ request.priority")  # noqa: E731
    assert digest(spec, priority, "zlab.policies.ordering") == here
    old = OWN.replace("zlab.policies.ordering", "policies.ordering").replace(
        "from zlab import Order", ""
    )
    path.write_text(old, "utf-8")
    assert digest(spec, other, "zlab.policies.ordering") != digest(spec)


def test_of_an_entry_point_all_counts_that_it_may_be_made_of() -> None:
    """Only the text of its class is stored."""
    was = stored()
    toml = was.toml.replace('kind = "first-come"', 'kind = "entry:mine"')
    snapshot = PolicySnapshot(
        "mine", toml, was.digest, {"entry:mine": "class Mine(FairShare): pass"}
    )

    def other(name: str) -> str | None:
        text = source(name)
        return text and text.replace("- request.priority", "+ request.priority")

    assert code_digest(snapshot, other) != code_digest(snapshot, source)


def test_the_defaults_of_a_base_class_count_for_a_class_that_does_not_name_it() -> None:
    """Such a class is given them when it is read."""
    was = stored()
    toml = was.toml.replace('kind = "first-come"', 'kind = "own.py:Mine"')
    text = "class Mine:\n    def key(self, request, history): return (0,)\n"
    snapshot = PolicySnapshot("mine", toml, was.digest, {"own.py:Mine": text})

    def other(name: str) -> str | None:
        text = source(name)
        return text and text.replace("return 16", "return 17")

    assert code_digest(snapshot, other) != code_digest(snapshot, source)


def test_nothing_of_the_users_runs(tmp_path: Path) -> None:
    was = stored()
    toml = was.toml.replace('kind = "first-come"', 'kind = "own.py:Mine"')
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass"
    code_digest(PolicySnapshot("mine", toml, was.digest, {"own.py:Mine": text}))
    assert not (tmp_path / "ran").exists()
