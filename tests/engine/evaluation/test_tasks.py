"""The synthetic tasks: traces agree with solvers that know nothing of the generator."""

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.train_reasoner import save_tokenizer
from tests.shared import SHARED
from zlab.engine.evaluation import tasks
from zlab.engine.tokenizer import Tokenizer

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def solve_chain(prompt: str) -> str:
    facts = {
        at: (to, int(weight)) for at, to, weight in re.findall(r"([A-Z]) ([A-Z]) (\d) ;", prompt)
    }
    start, tens, ones = re.findall(r"start (\w) ; steps (\d) (\d)", prompt)[0]
    at, total, notes = start, 0, 0
    for hop in range(1, int(tens + ones) + 1):
        at, weight = facts[at]
        total += weight
        if hop % 5 == 0:
            notes += total % 10
    return f"{at} {total % 10} {notes % 10}"


def solve_machine(prompt: str) -> str:
    registers = {name: int(value) for name, value in re.findall(r"(\w) is (\d) ,", prompt)}
    code = {
        label: rest
        for label, *rest in re.findall(r"(i\d+) : (\w) = (\w) (.) (\w) , (i\d+) (i\d+)", prompt)
    }
    at, tens, ones = re.findall(r"start (\w+) ; steps (\d) (\d)", prompt)[0]
    for _ in range(int(tens + ones)):
        target, left, operator, right, even, odd = code[at]
        registers[target] = OPERATORS[operator](registers[left], registers[right]) % 10
        at = odd if registers[target] % 2 else even
    return " ".join(str(registers[name]) for name in sorted(registers)) + f" {at}"


def solve_circuit(prompt: str) -> str:
    leaves = {name: int(value) for name, value in re.findall(r"(\w) is (\d) ;", prompt)}
    gates = {name: rest for name, *rest in re.findall(r"(\w) : (\w) (.) (\w) ;", prompt)}

    def value(name: str) -> int:
        if name in leaves:
            return leaves[name]
        left, operator, right = gates[name]
        return OPERATORS[operator](value(left), value(right)) % 10

    goals = re.findall(r"goals ([A-Z ]+) \.", prompt)[0].split()
    return " ".join(str(value(goal)) for goal in goals)


@pytest.mark.parametrize(
    ("name", "solve"),
    [("chain", solve_chain), ("machine", solve_machine), ("circuit", solve_circuit)],
)
@pytest.mark.parametrize("level", [1, 3])
def test_answers_are_what_another_solver_finds(
    name: str, solve: Callable[[str], str], level: int
) -> None:
    for problem in tasks.problems(name, 40, level=level):
        assert problem.answer == solve(problem.prompt), problem.prompt


@pytest.mark.parametrize("level", [1, 3])
def test_bfs_answers_are_shortest_paths_of_the_graph(level: int) -> None:
    for problem in tasks.problems("bfs", 40, level=level):
        near = {v: seen.split() for v, seen in re.findall(r"(\w) has ([A-Z ]+) ;", problem.prompt)}
        start, target = re.findall(r"from (\w) to (\w) \.", problem.prompt)[0]
        reached, distance = {start}, 0
        while target not in reached:
            reached |= {other for node in reached for other in near[node]}
            distance += 1
        length, _, *path = problem.answer.split()
        assert (path[0], path[-1], int(length)) == (start, target, distance)
        assert len(path) == distance + 1
        assert all(to in near[at] for at, to in pairwise(path))


def test_problems_depend_on_task_level_and_seed_alone() -> None:
    once = tasks.problems("circuit", 5, level=2, seed=3)
    assert once == tasks.problems("circuit", 5, level=2, seed=3)
    assert once == tasks.problems("circuit", 9, level=2, seed=3)[:5]
    assert once != tasks.problems("circuit", 5, level=2, seed=4)
    assert once[0] != tasks.problems("circuit", 5, level=1, seed=3)[0]


def test_the_facts_of_the_prompt_are_still_needed_near_the_end() -> None:
    """What a recency window drops: half of the trace from its end, facts of the prompt are used."""
    for problem in tasks.problems("circuit", 20):
        lines = re.findall(r"take (\w) : (\w) (.) (\w) ,", problem.trace)
        late = lines[len(lines) // 2 :]
        facts = {line for line in late if line not in lines[: len(lines) // 2]}
        assert len(facts) >= 3


def test_training_mixes_tasks_and_sizes_and_every_problem_fits_the_vocabulary() -> None:
    stream = tasks.training_problems("a", list(tasks.TASKS), short_share=0.5)
    drawn = [next(stream) for _ in range(400)]
    assert {problem.task for problem in drawn} == set(tasks.TASKS)
    lengths = [len(tasks.encode(f"{one.prompt} {one.trace}")) for one in drawn]
    assert min(lengths) < 150
    assert max(lengths) > 1000
    again = tasks.training_problems("a", list(tasks.TASKS), short_share=0.5)
    assert [next(again) for _ in range(10)] == drawn[:10]


def test_largest_training_sizes_can_be_written() -> None:
    for task in tasks.TASKS.values():
        tops = tuple(top + top // 16 for top in task.levels[tasks.HARDEST])
        task.problem(random.Random(1), tops)
        task.problem(random.Random(1), task.smallest)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chan", 1), "unknown task 'chan'; did you mean 'chain'? (choices: chain, bfs"),
        (("circuit", 0), "circuit needs a count of at least 1, got 0"),
    ],
)
def test_unknown_tasks_and_counts_are_refused(arguments: tuple[str, int], words: str) -> None:
    with pytest.raises(tasks.TaskError, match=re.escape(words)):
        tasks.problems(*arguments)


def test_unknown_level_is_refused_with_the_choices() -> None:
    with pytest.raises(tasks.TaskError, match=r"task bfs has no level 4 \(choices: 1, 2, 3\)"):
        tasks.problems("bfs", 1, level=4)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("hop . answer A 4 2 <eos>", "A 4 2"),
        ("answer 1 . answer 2", "2"),
        ("answer 1 <eos> answer 2", "1"),
        ("no words", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_word_answer(text: str, answer: str) -> None:
    assert tasks.answer_of(text) == answer


def test_the_saved_tokenizer_reads_and_writes_problems(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    problem = tasks.problems("machine", 1)[0]
    ids = tokenizer.encode(problem.prompt)
    assert ids == tasks.encode(problem.prompt)
    assert tokenizer.decode(ids, skip_special_tokens=False) == problem.prompt
    assert tokenizer.eos_token_id == tasks.WORD_IDS[tasks.EOS]


@pytest.mark.parametrize("name", ["chain", "bfs", "machine"])
def test_problems_are_words_of_the_shared_model(name: str) -> None:
    folder = SHARED / "quality" / "model"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    tokenizer = Tokenizer.from_folder(folder)
    problem = tasks.problems(name, 1)[0]
    text = f"{problem.prompt} {problem.trace}"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
