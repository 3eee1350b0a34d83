"""Classes of the user's own that answer a question: `FILE.py:Class`, or an entry point.

A class is checked when it is read: it has the members of its question and no other name that looks
like one, each method takes what the scheduler calls it with, and each value has the right type.
What the base class of the question has as a default (`zlab.policies.core.policy`) may be left out,
also by a class that does not inherit from it.

What a method raises later, in the middle of a run, is one line: the file, the class, the line and
the error.
"""

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from threading import RLock
from types import ModuleType, TracebackType
from typing import Any, get_type_hints

from zlab.policies.core.policy import ANSWERS, Compression
from zlab.policies.options import ByScore
from zlab.policies.ordering import Predictor
from zlab.policies.scorers import is_own_scorer, scorer_traits
from zlab.traces.choices import unknown_choice

ENTRY_POINTS = "zlab.policies"
BASES: Mapping[str, type[Any]] = {**ANSWERS, Predictor.question: Predictor}
OF_EVERY_ANSWER = ("question", "base")  # what a class says of itself

# Where own classes found what they import at release 0.1.0, and where it is now.
OLD_MODULES = {
    "policies": "zlab.policies",
    "policies.admission": "zlab.policies.options",
    "policies.batching": "zlab.policies.options",
    "policies.budget": "zlab.policies.budget",
    "policies.compression": "zlab.policies.options",
    "policies.core": "zlab.policies.core",
    "policies.core.policy": "zlab.policies.core.policy",
    "policies.core.request": "zlab.policies.core.request",
    "policies.ordering": "zlab.policies.ordering",
    "policies.predict": "zlab.policies.ordering",
    "policies.preemption": "zlab.policies.preemption",
    "policies.prefix": "zlab.policies.options",
    "policies.slots": "zlab.policies.options",
}
# Names that these modules have today, by the names of release 0.1.0.
OLD_NAMES = {"ComesBack": "Recovery"}
_ALIASING = RLock()


class PolicyError(ValueError):
    """A policy that cannot be read; the message names the value, the nearest known one and the
    choices.
    """


class OwnClassError(PolicyError):
    """A class of the user's own raised in the middle of a run, or answered what is no answer."""


def is_own(spec: str) -> bool:
    """Return whether this names a user's class.

    It is `FILE.py:Class`, or `entry:NAME` of the entry-point group `zlab.policies`.
    """
    return ".py:" in spec or spec.startswith("entry:")


def own_class(spec: str, question: str | None = None) -> type[Any]:
    """Return the class that `spec` names, checked and ready for a scheduler.

    The class remembers as `own_spec` where it came from. This runs the user's code: never call it
    on a name that came from an upload or over the network.

    Args:
        spec: `FILE.py:Class` or `entry:NAME`.
        question: the question that the class has to answer; None: the one that it says itself.

    Raises:
        PolicyError: the class cannot be had, or it does not answer the question.
    """
    name = spec.removeprefix("entry:")
    cls = _entry_point(name) if spec.startswith("entry:") else _from_file(spec)
    cls.own_spec = spec
    says = cls if hasattr(cls, "question") else _instance(cls)
    answers = str(getattr(says, "question", question))
    if answers not in BASES or (question is None and answers not in ANSWERS):
        raise PolicyError(
            f"{spec}: the class must say which question it answers: question = one of "
            f"{', '.join(ANSWERS)}"
        )
    if question is not None and answers != question:
        raise PolicyError(f"{spec}: the class answers the question {answers!r}, not {question!r}")
    base = BASES[answers]
    _check_names(cls, [name for owner in _written_in(cls) for name in vars(owner)], base)
    for name in _members(base):
        if _is_abstract(getattr(cls, name, getattr(base, name))):
            raise PolicyError(f"{spec}: {_a(base)} needs the method {_call(base, name)}")
    _fill_in(cls, base)
    value = _instance(cls)
    _check_names(cls, getattr(value, "__dict__", {}), base)
    check_own(value)
    _guard(cls, base)
    return cls


def check_own(value: Any) -> None:
    """Check an instance of a class that `own_class` has returned, with whatever settings it has.

    Raises PolicyError where a value or a method is none that the scheduler can work with.
    """
    spec, base = value.own_spec, BASES[value.question]
    for name in _members(base):
        _check_member(value, name, getattr(base, name))
    if base is Compression:
        if is_own_scorer(value.scorer):
            raise PolicyError(
                f"{spec}: scorer must be one that ships, not {value.scorer!r}; a scorer of one's "
                "own is named by the compression by-score"
            )
        try:
            ByScore(**{item.name: getattr(value, item.name) for item in fields(ByScore)})
        except ValueError as problem:
            raise PolicyError(f"{spec}: {problem}") from problem


def source_text(answer: Any) -> str:
    """The source text of the answer's class; of its whole file if it was named by file."""
    cls = type(answer)
    text: str = getattr(cls, "own_source", None) or inspect.getsource(cls)
    return text


# where a class comes from


@contextmanager
def _old_modules(source: str) -> Iterator[None]:
    """Let source text of release 0.1.0 import `policies.core.policy` and its neighbours.

    Registries and recordings hold such sources. The old names exist only while the text runs, and
    only where it mentions them: a package of the user's own named `policies` stays reachable.
    """
    if not re.search(r"^\s*(from|import)\s+policies\b", source, re.MULTILINE):
        yield
        return
    with _ALIASING:
        found = find_spec("policies")  # in a checkout it is the folder itself, by a second name
        is_ours = found is None or _is_here(found.origin)
        added = [name for name in OLD_MODULES if is_ours and name not in sys.modules]
        sys.modules.update({name: _old_module(name) for name in added})
        try:
            yield
        finally:
            for name in added:
                sys.modules.pop(name, None)


def _old_module(name: str) -> ModuleType:
    """A module under its old name, with the old names of what is in it."""
    content = vars(import_module(OLD_MODULES[name]))
    module = ModuleType(name)
    vars(module).update({key: value for key, value in content.items() if key[:2] != "__"})
    vars(module).update({old: content[new] for old, new in OLD_NAMES.items() if new in content})
    return module


def _is_here(origin: str | None) -> bool:
    return origin is not None and Path(origin).resolve().parent == Path(__file__).resolve().parent


def _entry_point(name: str) -> type[Any]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise PolicyError(
            f"no entry point {name!r} in the group {ENTRY_POINTS!r} (installed: "
            f"{', '.join(found) or 'none'})"
        )
    loaded: type[Any] = found[name].load()
    return loaded


def _from_file(spec: str) -> type[Any]:
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise PolicyError(f"{spec}: no such file: {file}")
    name_of_path = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[
        :12
    ]  # two files may have one stem
    module_spec = spec_from_file_location(f"zlab_own_{path.stem}_{name_of_path}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = module_from_spec(module_spec)
    sys.modules[module_spec.name] = (
        module  # dataclasses and `inspect` look a class's module up there
    )
    source = path.read_text("utf-8")
    try:
        with _old_modules(source):
            module_spec.loader.exec_module(module)
    except Exception as problem:
        raise PolicyError(
            f"{spec}: the file does not run: {type(problem).__name__}: {problem}"
        ) from problem
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        wrong = (
            f"the file has no class {name!r}"
            if name
            else f"which class of the file? Write {file}:CLASS"
        )
        raise PolicyError(
            f"{spec.removesuffix(':')}: {wrong} (it has: {', '.join(classes) or 'none'})"
        )
    cls.own_source = source  # type: ignore[attr-defined]
    return cls


# what a class must have


def _members(base: type[Any]) -> list[str]:
    """Names of what a class answers its question with."""
    return [name for name in vars(base) if name[0] != "_" and name not in OF_EVERY_ANSWER]


def _written_in(cls: type[Any]) -> list[type[Any]]:
    """The class and those of its base classes that are in the same file."""
    return [owner for owner in cls.__mro__ if owner.__module__ == cls.__module__]


def _check_names(cls: type[Any], names: Iterable[str], base: type[Any]) -> None:
    """Refuse a public name that is no member of the question, where it is taken for one.

    Such a name is one that the source text never reads. Where the class inherits from the base
    class it is always refused, because nothing would ever look at it; elsewhere, where it is like
    the name of a member.
    """
    known = [*_members(base), *OF_EVERY_ANSWER]
    read = _names_read(cls)
    for name in names:
        if name[0] == "_" or name in (*known, "own_spec", "own_source") or name in read:
            continue
        if issubclass(cls, base) or get_close_matches(name, known, n=1, cutoff=0.6):
            raise PolicyError(
                f"{cls.own_spec}: {unknown_choice(f'member of {_a(base)}', name, known)}; "
                "the name of a helper begins with an underscore"
            )


def _names_read(cls: type[Any]) -> set[str]:
    """Names that the source text of the class reads, as attributes or in any other way."""
    try:
        text = getattr(cls, "own_source", None) or inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError, KeyError):  # no source text: whatever the class has may be read
        return {name for owner in _written_in(cls) for name in vars(owner)}
    nodes = list(ast.walk(ast.parse(text)))
    loads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    read = {node.attr for node in loads if isinstance(node, ast.Attribute)}
    read |= {node.id for node in loads if isinstance(node, ast.Name)}
    return read | {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


def _fill_in(cls: type[Any], base: type[Any]) -> None:
    """Give a class that does not inherit from the base class what it leaves out."""
    for name in (*OF_EVERY_ANSWER, *_members(base)):
        if name in vars(base) and not hasattr(cls, name):
            setattr(cls, name, vars(base)[name])
    if base is Compression and cls.needs_queries is Compression.needs_queries:
        cls.needs_queries = property(lambda self: scorer_traits(self.scorer).needs_queries)


def _instance(cls: type[Any]) -> Any:
    spec = cls.own_spec
    try:
        return cls()
    except TypeError as problem:
        raise PolicyError(
            f"{spec}: the class must be constructible without arguments: {problem}"
        ) from problem
    except Exception as problem:
        raise PolicyError(f"{spec}: {_what(problem, _file_of(cls), '__init__')}") from problem


def _check_member(value: Any, name: str, default: Any) -> None:
    """Refuse a method that cannot be called as the scheduler does, or a value of a wrong type."""
    spec = value.own_spec
    try:
        found = getattr(value, name)
    except Exception as problem:
        raise PolicyError(f"{spec}: {_what(problem, _file_of(type(value)), name)}") from problem
    if isinstance(default, property):
        wanted = get_type_hints(default.fget)["return"]
        problem_is = _wrong_value(found, wanted)
        if problem_is:
            raise PolicyError(f"{spec}: {name} must be {problem_is}, not {_shown(found)}")
        return
    base = BASES[type(value).question]
    if not callable(found):
        raise PolicyError(
            f"{spec}: {name} must be a method {_call(base, name)}, not {_shown(found)}"
        )
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise PolicyError(f"{spec}: {name} must be a plain method {_call(base, name)}")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # of a builtin: only a call can show it
    arguments = list(inspect.signature(default).parameters)[1:]
    try:
        signature.bind(*arguments)
    except TypeError as problem:
        raise PolicyError(
            f"{spec}: {name}{signature} cannot be called as {_call(base, name)}: {problem}"
        ) from problem


def _wrong_value(value: Any, wanted: Any) -> str:
    """What the value should be, in words; empty where it is."""
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        names = ", ".join(f"{wanted.__name__}.{member.name}" for member in wanted)
        return "" if isinstance(value, wanted) else f"one of {names}"
    if wanted is bool:
        return "" if isinstance(value, bool) else "True or False"
    if wanted is int:
        return "" if _is_count(value) else "a whole number of at least 0"
    if wanted is float:
        return "" if _is_number(value) else "a number"
    return "" if isinstance(value, str) else "a text"


def _is_abstract(member: Any) -> bool:
    return bool(getattr(member, "__isabstractmethod__", False))


def _call(base: type[Any], name: str) -> str:
    """How a method of the question is called, in words."""
    return f"{name}({', '.join(list(inspect.signature(getattr(base, name)).parameters)[1:])})"


def _a(base: type[Any]) -> str:
    article = "an" if base.__name__[0] in "AO" else "a"
    return f"{article} {base.__name__.lower()}"


def _shown(value: Any) -> str:
    return "a method" if inspect.ismethod(value) else repr(value)


# what a class does in a run


def _guard(cls: type[Any], base: type[Any]) -> None:
    """Let what the user's own methods raise, or answer wrongly, be an OwnClassError."""
    for name in _members(base):
        raw = inspect.getattr_static(cls, name)
        owner = next(one for one in cls.__mro__ if name in vars(one))
        ours = owner.__module__.startswith("zlab.") or raw is vars(base)[name]
        if ours or getattr(getattr(raw, "fget", raw), "own_guard", False):
            continue
        if isinstance(raw, property) and raw.fget is not None:
            setattr(cls, name, property(_guarded(raw.fget, name, None)))
        elif not isinstance(getattr(base, name), property):
            setattr(cls, name, _guarded(raw, name, CHECKS[name]))


def _guarded(
    raw: Any, name: str, check: Callable[[Any, Any, tuple[Any, ...]], str] | None
) -> Callable[..., Any]:
    @wraps(getattr(raw, "__func__", raw))
    def call(self: Any, *arguments: Any) -> Any:
        cls = type(self)
        try:
            bound = raw.__get__(self, cls) if hasattr(raw, "__get__") else raw
            answer = bound(*arguments)
            wrong = check(answer, self, arguments) if check is not None else ""
        except OwnClassError:
            raise
        except Exception as problem:
            raise OwnClassError(
                f"{cls.own_spec}: {_what(problem, _file_of(cls), name)}"
            ) from problem
        if wrong:
            raise OwnClassError(f"{cls.own_spec}: {name} must give {wrong}, not {answer!r}")
        return answer

    call.own_guard = True  # type: ignore[attr-defined]
    return call


def _what(problem: BaseException, file: str | None, name: str) -> str:
    """The error and the last line of the user's file on the way to it."""
    line = _line_in(problem.__traceback__, file)
    where = f" (line {line})" if line is not None else ""
    words = " ".join(str(problem).split())
    return f"{name} raised {type(problem).__name__}{f': {words}' if words else ''}{where}"


def _line_in(trace: TracebackType | None, file: str | None) -> int | None:
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _file_of(cls: type[Any]) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isnan(float(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def _key(answer: Any, order: Any, arguments: tuple[Any, ...]) -> str:
    numbers = answer if isinstance(answer, tuple) else (answer,)
    return "" if numbers and all(map(_is_number, numbers)) else "a tuple of numbers"


def _rank(answer: Any, preemption: Any, arguments: tuple[Any, ...]) -> str:
    return "" if answer is None or isinstance(answer, Integral) else "a whole number or None"


def _rank_with_blocks(answer: Any, preemption: Any, arguments: tuple[Any, ...]) -> str:
    return "" if answer is None or _is_number(answer) else "a number or None"


def _floor(answer: Any, budget: Any, arguments: tuple[Any, ...]) -> str:
    return "" if answer is None or _is_count(answer) else "a number of blocks or None"


def _may_grow(answer: Any, budget: Any, arguments: tuple[Any, ...]) -> str:
    fits = isinstance(answer, Integral) or type(answer).__name__ == "bool_"  # numpy's
    return "" if fits else "True or False"


def _shrink_to(answer: Any, budget: Any, arguments: tuple[Any, ...]) -> str:
    held, block_size, _ = arguments
    least = budget.floor(block_size) or 0
    fits = isinstance(answer, Integral) and least <= int(answer) <= held
    return "" if fits else f"{least} to {held} blocks, from its floor to what the request has"


def _count(answer: Any, value: Any, arguments: tuple[Any, ...]) -> str:
    return "" if _is_count(answer) else "a whole number of at least 0"


def _predict(answer: Any, predictor: Any, arguments: tuple[Any, ...]) -> str:
    return "" if _is_number(answer) else "a number of tokens"


CHECKS: Mapping[str, Callable[[Any, Any, tuple[Any, ...]], str]] = {
    "key": _key,
    "rank": _rank,
    "rank_with_blocks": _rank_with_blocks,
    "floor": _floor,
    "may_grow": _may_grow,
    "shrink_to": _shrink_to,
    "watermark": _count,
    "count": _count,
    "predict": _predict,
}
