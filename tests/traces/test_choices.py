"""The message for an unknown name: the value, the nearest choice, and all choices."""

import ast

import pytest

from tests.house_source import ROOT, read_modules
from zlab.traces.choices import did_you_mean, unknown_choice


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("hybrd", "hybrid"),
        ("HYBRID", "hybrid"),
        ("full", "full-kv"),  # the beginning of a name
        ("fixed", "Fixed"),
    ],
)
def test_nearest_choice_is_named(value: str, near: str) -> None:
    assert did_you_mean(value, ["full-kv", "hybrid", "Fixed"]) == f"; did you mean {near!r}?"


@pytest.mark.parametrize("value", ["", "xyzzy"])
def test_a_name_like_no_choice_gets_no_hint(value: str) -> None:
    assert did_you_mean(value, ["full-kv", "hybrid"]) == ""


def test_message_names_value_and_choices() -> None:
    words = unknown_choice("GPU", "h20", ["h100", "h200"])
    assert words == "unknown GPU 'h20'; did you mean 'h200'? (choices: h100, h200)"
    assert unknown_choice("model", "x", [], "or a file").endswith("(choices: or a file)")
    assert unknown_choice("model", "x", []).endswith("(choices: none)")


def test_no_other_module_makes_its_own_hint() -> None:
    """`get_close_matches` elsewhere would be a second rule for what is near."""
    allowed = {"traces.choices", "policies.own"}  # own: is a name like a member's, so misspelt?
    rooms = ("traces", "policies", "sim", "engine", "dashboard", "zlab")
    found = {
        module.name
        for module in read_modules(ROOT, rooms)
        for one in module.imports
        if one.target == "difflib.get_close_matches"
    }
    assert found <= allowed
    strings = [
        (module.name, node.lineno)
        for module in read_modules(ROOT, rooms)
        if module.name != "traces.choices"
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "did you mean" in node.value
    ]
    assert strings == []
