"""A user's own answer: a Python file with one class, named as `path/to/file.py:Class`, or an entry point."""

import hashlib
import inspect
import sys
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ENTRY_POINTS = "zlab.policies"


def is_own(spec: str) -> bool:
    """Whether this names a user's class: `FILE.py:Class`, or `entry:NAME` of the entry-point group `zlab.policies`."""
    return ".py:" in spec or spec.startswith("entry:")


def load_own(spec: str, error: type[Exception]) -> Any:
    """An instance of the class, which remembers as `own_spec` where it came from. Raises `error` with what is wrong.

    This runs the user's code: never call it on a name that came from an upload or over the network.
    """
    cls = _entry_point(spec.removeprefix("entry:"), error) if spec.startswith("entry:") else _from_file(spec, error)
    cls.own_spec = spec
    try:
        return cls()
    except TypeError as problem:
        raise error(f"{spec}: the class must be constructible without arguments: {problem}") from problem


def source_text(answer: Any) -> str:
    """The source text of the answer's class; of its whole file if it was named by file."""
    cls = type(answer)
    text: str = getattr(cls, "own_source", None) or inspect.getsource(cls)
    return text


def _entry_point(name: str, error: type[Exception]) -> type[Any]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise error(f"no entry point {name!r} in the group {ENTRY_POINTS!r} (installed: {', '.join(found) or 'none'})")
    loaded: type[Any] = found[name].load()
    return loaded


def _from_file(spec: str, error: type[Exception]) -> type[Any]:
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"{spec}: no such file: {file}")
    name_of_path = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]  # two files may have one stem
    module_spec = spec_from_file_location(f"zlab_own_{path.stem}_{name_of_path}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and `inspect` look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as problem:
        raise error(f"{spec}: the file does not run: {type(problem).__name__}: {problem}") from problem
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        wrong = f"the file has no class {name!r}" if name else f"which class of the file? Write {file}:CLASS"
        raise error(f"{spec.removesuffix(':')}: {wrong} (it has: {', '.join(classes) or 'none'})")
    cls.own_source = path.read_text("utf-8")  # type: ignore[attr-defined]
    return cls
