"""Rows, their errors, and the checkers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zlab.engine.errors import EngineError
from zlab.engine.evaluation import tasks
from zlab.engine.evaluation.dataset import (
    CheckerError,
    DataError,
    Example,
    final_answer,
    find_checker,
    judge,
    read_datasets,
)


def write(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows)
    )
    return str(path)


def example(answer: Any, **row: Any) -> Example:
    return Example("a.jsonl", 3, "3", "what?", None, answer, row={"answer": answer, **row})


def test_rows_of_prompts_and_of_messages_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}]
    path = write(
        tmp_path / "sums.jsonl",
        {"prompt": "2 + 2?", "answer": 4, "subject": "sums"},
        "",
        {"messages": messages, "answer": "2", "id": "two"},
    )
    (read,) = read_datasets([path], None, None)
    first, second = read.examples
    assert (read.name, read.checker.name) == ("sums", "exact")
    assert (first.prompt, first.answer, first.row["subject"]) == ("2 + 2?", 4, "sums")
    assert (second.messages, second.id, second.line) == (tuple(messages), "two", 3)
    (shorter,) = read_datasets([path], None, 1)
    assert shorter.examples == read.examples[:1]
    assert shorter.sha256 != read.sha256


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows"),
        (["\n"], "has no rows"),
        (
            [{"prompt": "a", "answer": 1}, {"prompt": "b", "anwser": 1}],
            ":2: the row has no answer; did you mean 'anwser'?",
        ),
        ([{"prompt": "a", "answer": None}], ":1: the row has no answer"),
        ([{"prompt": "a", "answer": " "}], ":1: the row has no answer, got ' '"),
        ([{"prompt": "a", "answer": [1]}], ":1: the answer must be a text or a number, got [1]"),
        ([{"prompt": "a", "answer": True}], "got true"),
        ([{"answer": 1}], "neither a prompt nor messages"),
        ([{"answer": 1, "prompt": "a", "messages": []}], "a prompt and messages"),
        ([{"answer": 1, "prompt": ""}], "the prompt must be a text, got ''"),
        ([{"answer": 1, "messages": [{"role": "user"}]}], 'got {"role": "user"}'),
        ([{"answer": 1, "messages": []}], "must be a list of messages, got []"),
        ([{"answer": 1, "prompt": "a", "trace": 5}], "the trace must be a text, got 5"),
        (["{"], ":1: not JSON"),
        (["[1]"], ":1: must be a JSON object, got [1]"),
        (
            [{"prompt": "a", "answer": 1, "id": 7}, {"prompt": "b", "answer": 1, "id": 7}],
            ":2: id '7' is also that of line 1",
        ),
    ],
)
def test_a_wrong_row_is_named_with_line_and_value(tmp_path: Path, rows: Any, words: str) -> None:
    path = write(tmp_path / "data.jsonl", *rows)
    with pytest.raises(DataError, match=re.escape(words)) as found:
        read_datasets([path], None, None)
    assert str(path) in str(found.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("task:chain?levle=2", "unknown setting 'levle'; did you mean 'level'?"),
        ("task:chain?level=two", "level must be a whole number, got 'two'"),
        ("task:chain?level", "'level' is not of the form key=value"),
        ("task:maze", "unknown task 'maze'"),
        ("nowhere.jsonl", "cannot read nowhere.jsonl: No such file"),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, words: str) -> None:
    with pytest.raises(EngineError, match=re.escape(words)):
        read_datasets([spec], None, None)


def test_one_spec_may_name_several_tasks() -> None:
    chain, circuit = read_datasets(["task:chain,circuit?count=7&level=1&seed=2"], None, 5)
    assert (chain.name, circuit.name, len(circuit.examples)) == ("chain", "circuit", 5)
    assert circuit.source == "task:circuit?count=5&level=1&seed=2"
    trace = chain.examples[0].trace
    assert trace is not None
    assert judge(chain.checker, trace, chain.examples[0])
    assert not judge(chain.checker, trace, chain.examples[1])
    assert [one.name for one in read_datasets(["task:all?count=1"], None, None)] == list(
        tasks.TASKS
    )


def test_a_check_for_tasks_alone_and_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="check 'number' is for files"):
        read_datasets(["task:chain"], "number", None)
    path = write(tmp_path / "chain.jsonl", {"prompt": "a", "answer": 1})
    with pytest.raises(DataError, match="two sources are called 'chain'"):
        read_datasets(["task:chain", path], None, None)


@pytest.mark.parametrize(
    ("output", "final"),
    [
        ("42", "42"),
        (" It is so.\nThe answer is: 42.\n", "42"),
        ("**Answer:** 42", "42"),
        (r"so \boxed{\frac{1}{2}} and \boxed{x", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> \boxed{ 2 }", "2"),
        ("<think>answer is 1</think> 7", "7"),
        ("first answer is 1\nthen the answer is 2", "2"),
    ],
)
def test_final_answers(output: str, final: str) -> None:
    assert final_answer(output).removeprefix("** ") == final


@pytest.mark.parametrize(
    ("checker", "answer", "right", "wrong"),
    [
        ("exact", "Paris France", ["Paris  France", "the answer is Paris France."], ["paris", ""]),
        ("exact", 4, ["4", r"\boxed{4}"], ["4.0", "14"]),
        (
            "number",
            "1000",
            ["1,000", "it is 1e3", r"\boxed{1000.0}", "= 2000/2"],
            ["100", "", "one"],
        ),
        ("number", 0.5, ["1/2", "0.50", ".5", "answer is 1 / 2"], ["5", "2", "-0.5"]),
        ("number", "-3", ["-3", "x = -3."], ["3"]),
        (
            "choice",
            "B",
            ["B", "(B)", "the answer is B", r"\boxed{B}", "A is wrong, so B"],
            ["A", "", "b"],
        ),
        ("choice", "(c)", ["C", "answer: (C) since A is not"], ["A"]),
        ("math-verify", r"\frac{1}{2}", [r"$\frac{2}{4}$", r"so \boxed{0.5}"], ["$2$", "no idea"]),
        ("math-verify", "7", [r"<think>\boxed{9}</think>\boxed{7}"], [r"\boxed{8}"]),
    ],
)
def test_checkers(checker: str, answer: Any, right: list[str], wrong: list[str]) -> None:
    if checker == "math-verify":
        pytest.importorskip("math_verify")
    found = find_checker(checker)
    one = example(answer)
    found.prepare(one)
    for output in right:
        assert judge(found, output, one), output
    for output in wrong:
        assert not judge(found, output, one), output


@pytest.mark.parametrize(
    ("checker", "answer", "words"),
    [
        ("number", "many", "a.jsonl:3: the answer must be a number, got 'many'"),
        ("choice", "Both", "a.jsonl:3: the answer must be one letter, got 'Both'"),
        ("exact", {"a": 1}, "a.jsonl:3: the answer must be a text or a number"),
    ],
)
def test_answers_that_a_checker_cannot_use(checker: str, answer: Any, words: str) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        find_checker(checker).prepare(example(answer))


def checker_file(path: Path, body: str) -> str:
    path.write_text(body)
    return str(path)


def test_a_function_of_ones_own_sees_output_and_row(tmp_path: Path) -> None:
    body = "def even(output, row):\n    return int(output) % row['modulus'] == row['answer']\n"
    file = checker_file(tmp_path / "own.py", body)
    checker = find_checker(f"{file}:even")
    assert judge(checker, "7", example(1, modulus=2))
    assert not judge(checker, "8", example(1, modulus=2))
    with pytest.raises(
        CheckerError, match=r"a.jsonl:3: checker .*own.py:even raised ValueError.*'x'"
    ):
        judge(checker, "x", example(1, modulus=2))


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        ("def check(output, row):\n    return 1\n", "check", "must return True or False, got 1"),
        ("def check(output):\n    return True\n", "check", "must take the output and the row"),
        (
            "def chek(output, row):\n    return True\n",
            "check",
            "unknown function 'check'; did you mean 'chek'?",
        ),
        ("1 / 0\n", "check", "the file raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_is_no_checker(tmp_path: Path, body: str, name: str, words: str) -> None:
    file = checker_file(tmp_path / "own.py", body)
    with pytest.raises(CheckerError, match=re.escape(words)):
        judge(find_checker(f"{file}:{name}"), "7", example(1))


def test_unknown_checkers() -> None:
    with pytest.raises(CheckerError, match="'nubmer'; did you mean 'number'"):
        find_checker("nubmer")
    with pytest.raises(CheckerError, match=r"there is no file 'none.py'"):
        find_checker("none.py:check")
