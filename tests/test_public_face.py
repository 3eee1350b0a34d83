"""The public names of `zlab`: sorted, importable, typed, and loaded only when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zlab

STUB = Path(zlab.__file__).with_suffix(".pyi")


def test_public_names_are_sorted_and_exist() -> None:
    assert list(zlab.__all__) == sorted(zlab.__all__)
    pytest.importorskip("torch")
    for name in zlab.__all__:
        assert getattr(zlab, name).__name__ == name


def test_stub_names_the_same() -> None:
    imported = {
        alias.name: node.module
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == vars(zlab)["_HOME"]


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="'Ordre'; did you mean 'Order'"):
        zlab.Ordre  # type: ignore[attr-defined]  # noqa: B018


def test_import_is_light() -> None:
    code = "import sys, zlab; print(sorted({'torch', 'simpy', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_have_one_name() -> None:
    code = (
        "import sys, zlab.sim.replay; print([m for m in sys.modules if m.split('.')[0] in "
        "('sim', 'traces', 'policies')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
