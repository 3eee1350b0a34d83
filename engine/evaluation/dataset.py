"""Problems to evaluate: rows of a JSON Lines file or of a synthetic task, and their checkers.

A data spec is `FILE.jsonl` or `task:NAME[,NAME...]?count=200&level=3&seed=1`. A row of a file has a
`prompt` (text) or `messages` (a conversation), an `answer`, and may have an `id` and a `trace`
(what a model that solves it writes); other keys are kept for a checker of one's own.
"""

import hashlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol
from urllib.parse import parse_qsl

from zlab.engine.errors import EngineError
from zlab.engine.evaluation import tasks
from zlab.traces.choices import did_you_mean, unknown_choice

TASK = "task:"
DEFAULT_COUNT = 100
SHOWN = 120  # characters of a value in a message
END_OF_THOUGHT = "</think>"


class DataError(EngineError):
    """Data that cannot be evaluated; the message names the place and the value."""


class CheckerError(EngineError):
    """A checker that does not exist, raised, or returned no truth value."""


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        source: the data spec.
        line: line of the file, or number of the synthetic problem, from 1.
        id: the row's own id, or its place.
        prompt: text; None where the row has messages.
        messages: a conversation up to where the answer begins; None where the row has a prompt.
        answer: as the row has it.
        trace: what a model that solves the problem writes; None where it is not known.
        row: the row as it was read.
    """

    source: str
    line: int
    id: str
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    answer: Any
    trace: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Source and line for people."""
        return f"{self.source}:{self.line}"


class Checker(Protocol):
    """Says whether an output answers a problem."""

    name: str

    def prepare(self, example: Example) -> None:
        """Raise DataError where the row's answer is none that this checker can compare with."""

    def check(self, output: str, example: Example) -> bool:
        """Whether the output is right; `judge` turns what it raises into CheckerError."""


@dataclass(frozen=True)
class Dataset:
    """Problems of one source with their checker.

    Attributes:
        name: short, for tables: the task or the file's name.
        source: the spec.
        examples: the problems, at least one.
        checker: of all of them.
        sha256: over prompts, messages and answers.
    """

    name: str
    source: str
    examples: tuple[Example, ...]
    checker: Checker
    sha256: str


def judge(checker: Checker, output: str, example: Example) -> bool:
    """Whether the output is right. Raises CheckerError with the row and the output."""
    try:
        found = checker.check(output, example)
    except Exception as error:  # a checker of one's own may raise anything
        raise CheckerError(
            f"{example.place}: checker {checker.name} raised {type(error).__name__}: {error}; "
            f"answer {_short(example.answer)}, output {_short(output)}"
        ) from error
    if not isinstance(found, bool):
        raise CheckerError(
            f"{example.place}: checker {checker.name} must return True or False, "
            f"got {_short(found)}"
        )
    return found


# reading


def read_datasets(specs: Sequence[str], check: str | None, limit: int | None) -> list[Dataset]:
    """The data of a command line.

    Args:
        specs: files and `task:` specs.
        check: how rows of files are checked, as `find_checker` takes it; "exact" if None.
        limit: the most problems of each source; None takes all.

    Returns:
        One data set for each file and for each task of a spec.

    Raises:
        DataError: there is no such file or task, it has no rows, or a row is wrong.
        CheckerError: there is no such checker.
    """
    if check is not None and all(spec.startswith(TASK) for spec in specs):
        raise DataError(f"check {check!r} is for files; a task has its own")
    checker = find_checker(check or Exact.name)
    found: list[Dataset] = []
    for spec in specs:
        found += _task_data(spec, limit) if spec.startswith(TASK) else [_file(spec, checker, limit)]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two sources are called {name!r}: {_sources(found, name)}")
    return found


def _sources(data: Sequence[Dataset], name: str) -> str:
    return " and ".join(one.source for one in data if one.name == name)


def _task_data(spec: str, limit: int | None) -> list[Dataset]:
    names, _, query = spec.removeprefix(TASK).partition("?")
    known = {"count": DEFAULT_COUNT, "level": tasks.HARDEST, "seed": tasks.DEFAULT_SEED}
    for key, value in _pairs(spec, query):
        if key not in known:
            raise DataError(f"{spec}: {unknown_choice('setting', key, known)}")
        if not value.isdecimal():
            raise DataError(f"{spec}: {key} must be a whole number, got {value!r}")
        known[key] = int(value)
    count = known["count"] if limit is None else min(limit, known["count"])
    every = list(tasks.TASKS) if names == "all" else names.split(",")
    return [_task(name, count, known["level"], known["seed"]) for name in every]


def _pairs(spec: str, query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise DataError(f"{spec}: {query!r} is not of the form key=value&key=value") from error


def _task(name: str, count: int, level: int, seed: int) -> Dataset:
    source = f"{TASK}{name}?count={count}&level={level}&seed={seed}"
    made = tasks.problems(name, count, level=level, seed=seed)
    examples = tuple(
        Example(source, line, f"{name}-{line}", one.prompt, None, one.answer, one.trace)
        for line, one in enumerate(made, start=1)
    )
    return Dataset(name, source, examples, TaskAnswer(), _digest(examples))


def _file(spec: str, checker: Checker, limit: int | None) -> Dataset:
    path = Path(spec)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {spec}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{spec}: not UTF-8 text: {error}") from error
    lines = [(line, row) for line, row in enumerate(text.splitlines(), start=1) if row.strip()]
    if not lines:
        raise DataError(f"{spec}: has no rows: one JSON object a line is expected")
    examples = tuple(_example(spec, line, row) for line, row in lines[:limit])
    for example in examples:
        checker.prepare(example)
    seen: dict[str, Example] = {}
    for example in examples:
        if example.id in seen:
            raise DataError(
                f"{example.place}: id {example.id!r} is also that of line {seen[example.id].line}"
            )
        seen[example.id] = example
    return Dataset(path.stem, spec, examples, checker, _digest(examples))


def _example(source: str, line: int, text: str) -> Example:
    place = f"{source}:{line}"
    try:
        row = json.loads(text)
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}: {_short(text)}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: must be a JSON object, got {_short(row)}")
    if row.get("answer") is None:
        near = did_you_mean("answer", [key for key in row if key != "answer"])
        raise DataError(f"{place}: the row has no answer{near}: {_short(row)}")
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        what = "neither a prompt nor messages" if prompt is None else "a prompt and messages"
        raise DataError(f"{place}: the row has {what}; it needs one of them: {_short(row)}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise DataError(f"{place}: the prompt must be a text, got {_short(prompt)}")
    trace = row.get("trace")
    if trace is not None and not isinstance(trace, str):
        raise DataError(f"{place}: the trace must be a text, got {_short(trace)}")
    conversation = None if messages is None else _messages(place, messages)
    id = str(row.get("id", line))
    return Example(source, line, id, prompt, conversation, row["answer"], trace, row)


def _messages(place: str, messages: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: messages must be a list of messages, got {_short(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place}: a message needs role and content, got {_short(message)}")
    return tuple(messages)


def _digest(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for one in examples:
        content = [one.id, one.prompt, one.messages, one.answer, one.trace]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


# checkers


def final_answer(output: str) -> str:
    r"""What an output ends with: the last `\boxed{...}`, else what follows the last "answer is" or
    "answer:" on its line, else all of it; after the end of a thought, where there is one.
    """
    text = output.rpartition(END_OF_THOUGHT)[2]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    said = re.findall(r"(?i)\banswer\s*(?:is|:)\s*:?\s*(\S[^\n]*)", text)
    return (said[-1] if said else text).strip().strip("*").rstrip(".").strip()


def _last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced."""
    for found in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for place in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                content: str = text[found.end() : place]
                return content
    return None


def _words(value: Any) -> str:
    """A JSON answer as text with single spaces; numbers as JSON writes them."""
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())


def _as_text(example: Example) -> str:
    """The row's answer as text. Raises DataError where it is neither text nor a number."""
    answer = example.answer
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{example.place}: the answer must be a text or a number, got {_short(answer)}"
        )
    text = _words(answer)
    if not text:
        raise DataError(f"{example.place}: the row has no answer, got {_short(answer)}")
    return text


class TaskAnswer:
    """The words after the last `answer` of a synthetic task."""

    name = "task"

    def prepare(self, example: Example) -> None:
        """A task's own answer always fits."""

    def check(self, output: str, example: Example) -> bool:
        """Compare word by word."""
        return bool(tasks.answer_of(output) == example.answer)


class Exact:
    """The final answer, word by word."""

    name = "exact"

    def prepare(self, example: Example) -> None:
        """Raise DataError where the answer is no text."""
        _as_text(example)

    def check(self, output: str, example: Example) -> bool:
        """Compare the final answer, spaces aside."""
        return _words(final_answer(output)) == _words(example.answer)


class Number:
    """The last number of the final answer, equal in value: 1,000 and 1e3, 0.5 and 1/2."""

    name = "number"
    pattern = re.compile(
        r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
    )

    def prepare(self, example: Example) -> None:
        """Raise DataError where the answer is no number."""
        if self._value(_as_text(example)) is None:
            raise DataError(
                f"{example.place}: the answer must be a number, got {_short(example.answer)}"
            )

    def check(self, output: str, example: Example) -> bool:
        """Compare by value."""
        numbers = self.pattern.findall(final_answer(output))
        return bool(numbers) and self._value(numbers[-1]) == self._value(_words(example.answer))

    @staticmethod
    def _value(text: str) -> Fraction | None:
        above, _, below = text.replace(",", "").replace(" ", "").partition("/")
        try:
            return Fraction(above) / Fraction(below or 1)
        except (ValueError, ZeroDivisionError):
            return None


class MultipleChoice:
    """A letter of a multiple choice: `B`, `(B)`, boxed, or "the answer is B"."""

    name = "choice"
    pattern = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z'])")

    def prepare(self, example: Example) -> None:
        """Raise DataError where the answer is no letter."""
        if not re.fullmatch(r"\(?[A-Za-z]\)?", _as_text(example)):
            raise DataError(
                f"{example.place}: the answer must be one letter, got {_short(example.answer)}"
            )

    def check(self, output: str, example: Example) -> bool:
        """Compare the first letter of the final answer; of an output without one, the last."""
        final = final_answer(output)
        whole = final == output.rpartition(END_OF_THOUGHT)[2].strip()
        letters = self.pattern.findall(final)
        wanted = _words(example.answer).strip("()").upper()
        return bool(letters) and letters[-1 if whole else 0] == wanted


class MathVerify:
    """Equal by the rules of the library math-verify (LaTeX, sets, intervals, equations)."""

    name = "math-verify"

    def __init__(self) -> None:
        """Raise CheckerError where the library is missing."""
        try:
            self._parse = resolve_name("math_verify:parse")
            self._verify = resolve_name("math_verify:verify")
        except ModuleNotFoundError as error:
            raise CheckerError(
                f"checker {self.name} needs a package that is missing ({error}): "
                "pip install 'zipage-lab[evaluate]'"
            ) from error

    def _gold(self, example: Example) -> Any:
        text = _as_text(example)
        return self._parse(text) or self._parse(f"${text}$")

    def prepare(self, example: Example) -> None:
        """Raise DataError where the library cannot read the answer."""
        if not self._gold(example):
            raise DataError(
                f"{example.place}: {self.name} cannot read the answer {_short(example.answer)}"
            )

    def check(self, output: str, example: Example) -> bool:
        """Compare by the library's rules; an output without an expression is wrong."""
        text = output.rpartition(END_OF_THOUGHT)[2]
        return bool(self._verify(self._gold(example), self._parse(text)))


class FunctionChecker:
    """`FILE.py:NAME`, a function of the output's text and the row; it returns True or False."""

    def __init__(self, spec: str) -> None:
        """Load the function. Raises CheckerError where none of that name takes two arguments."""
        self.name = spec
        file, _, name = spec.rpartition(":")
        path = Path(file)
        if not path.is_file():
            raise CheckerError(f"checker {spec!r}: there is no file {file!r}")
        found = importlib.util.spec_from_file_location(f"checker_{path.stem}", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except Exception as error:  # the user's file may raise anything
            raise CheckerError(
                f"checker {spec!r}: the file raised {type(error).__name__}: {error}"
            ) from error
        function = getattr(module, name, None)
        if not callable(function):
            names = [one for one, value in vars(module).items() if inspect.isfunction(value)]
            raise CheckerError(f"checker {spec!r}: {unknown_choice('function', name, names)}")
        try:
            inspect.signature(function).bind("output", {})
        except TypeError as error:
            raise CheckerError(
                f"checker {spec!r}: must take the output and the row, {error}"
            ) from error
        self._function: Callable[[str, Mapping[str, Any]], Any] = function

    def prepare(self, example: Example) -> None:
        """Any answer may do."""

    def check(self, output: str, example: Example) -> bool:
        """Ask the function; `judge` refuses what is no truth value."""
        found: bool = self._function(output, example.row)
        return found


BUILT_IN: Mapping[str, Callable[[], Checker]] = {
    Exact.name: Exact,
    Number.name: Number,
    MultipleChoice.name: MultipleChoice,
    MathVerify.name: MathVerify,
}


def find_checker(spec: str) -> Checker:
    """The checker of that name, or `FILE.py:FUNCTION`. Raises CheckerError with the choices."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if ".py:" in spec:
        return FunctionChecker(spec)
    raise CheckerError(unknown_choice("checker", spec, BUILT_IN, "FILE.py:FUNCTION"))
