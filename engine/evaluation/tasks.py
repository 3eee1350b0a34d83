"""Synthetic reasoning tasks with exactly checkable answers.

Each task states facts in its prompt and solves the problem step by step in a long trace. The trace
is a function of the prompt (self-checks and filler words included), so a greedy output can be
compared with it token by token. Late steps need facts of the prompt and of the trace's own
beginning: a cache that keeps only the latest tokens fails.

    chain    walk along facts `node next weight`, keep a running total, note it every fifth hop
    bfs      breadth-first search with a written queue, then the path back along the parents
    machine  a register machine with jumps by parity; an operand is where it was last written
    circuit  evaluate gates depth first with a written stack; values are computed once, reused late

A prompt and a trace are words with single spaces between them, one token each. The four grammars
share one vocabulary (`VOCABULARY`); `benchmarks.train_reasoner` writes its tokenizer.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zlab.engine.errors import EngineError
from zlab.traces.choices import unknown_choice

Sizes = tuple[int, ...]
Written = tuple[list[str], list[str]]  # parts of the prompt and of the trace

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ANSWER = "answer"  # the word before the answer; the end of the output follows the answer
LOWER = "abcdefghijklmnopqrstuvwxyz"
UPPER = LOWER.upper()
NUM_LABELS = 12
FILLER = (  # by a digit that the step computed; two are empty, so that a step may go without
    "hmm , let me think about this once more .",
    "okay , that looks right to me .",
    "wait , is that correct ? yes , it is .",
    "so far so good , go on .",
    "this is getting long , but it is fine .",
    "let me be careful here and make no mistake .",
    "good .",
    "alright , moving on to the next one .",
    "",
    "",
)
GRAMMAR = (
    ". , : ; ? + - * = ( ) walk start steps think answer hop fact total check is ok note at end "
    "notes sum to graph from has take new old seen queue empty back machine step odd even go "
    "circuit goals goal open push stack"
)
DEFAULT_SEED = 1  # of held-out problems
HARDEST = 3


class TaskError(EngineError):
    """A task, a level or a count that does not exist."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a task.

    Attributes:
        task: the task's name.
        prompt: what the model is given, `<bos>` included.
        trace: what a model that solves the problem writes, `<eos>` included.
    """

    task: str
    prompt: str
    trace: str

    @property
    def answer(self) -> str:
        """The words between the last `answer` of the trace and its end."""
        return answer_of(self.trace)


@dataclass(frozen=True)
class EvaluationTask:
    """A grammar and its levels of difficulty.

    Attributes:
        name: as in `task:NAME`.
        about: one line for people.
        size_names: what each size of a level counts.
        smallest: the sizes of the smallest problem that makes sense.
        levels: level -> sizes. Level 3 is the hardest, about 1,000 tokens; level 4, where there is
            one, has half as many facts at about the same length.
        write: makes prompt and trace of the given sizes.
    """

    name: str
    about: str
    size_names: tuple[str, ...]
    smallest: Sizes
    levels: Mapping[int, Sizes]
    write: Callable[..., Written]

    def problem(self, rng: random.Random, sizes: Sizes) -> Problem:
        """One problem of these sizes."""
        prompt, trace = self.write(rng, *sizes)
        return Problem(self.name, _joined([BOS, *prompt]), _joined([*trace, EOS]))

    def training_sizes(self, rng: random.Random, level: int) -> Sizes:
        """Sizes for training: each uniform between the smallest and a little above the level's."""
        tops = self.levels[level]
        return tuple(
            rng.randint(low, max(low, top + top // 16))
            for low, top in zip(self.smallest, tops, strict=True)
        )


def find_task(name: str) -> EvaluationTask:
    """The task of that name. Raises TaskError with the choices."""
    if name not in TASKS:
        raise TaskError(unknown_choice("task", name, TASKS))
    return TASKS[name]


def problems(
    name: str, count: int, *, level: int = HARDEST, seed: int = DEFAULT_SEED
) -> list[Problem]:
    """Problems that no training has seen: the same ones for the same arguments.

    Args:
        name: the task.
        count: how many.
        level: difficulty, a key of `EvaluationTask.levels`.
        seed: other seeds give other problems.

    Raises:
        TaskError: there is no such task or level, or the count is not positive.
    """
    task = find_task(name)
    if level not in task.levels:
        choices = ", ".join(str(known) for known in task.levels)
        raise TaskError(f"task {name} has no level {level} (choices: {choices})")
    if count < 1:
        raise TaskError(f"task {name} needs a count of at least 1, got {count}")
    sizes = task.levels[level]
    return [
        task.problem(random.Random(f"held out {seed} {name} {level} {number}"), sizes)
        for number in range(count)
    ]


def training_problems(
    seed: str, names: Sequence[str], *, short_share: float, level: int = HARDEST
) -> Iterator[Problem]:
    """Endless problems for training, of all tasks alike.

    Args:
        seed: names this stream; held-out problems use seeds of another form.
        names: the tasks.
        short_share: share of problems of at most two thirds of level 1's sizes.
        level: the hardest level to be learnt.
    """
    rng = random.Random(f"training {seed}")
    tasks = [find_task(name) for name in names]
    while True:
        task = rng.choice(tasks)
        if rng.random() < short_share:
            tops = task.levels[1]
            sizes = tuple(
                rng.randint(low, max(low, -(-2 * top // 3)))
                for low, top in zip(task.smallest, tops, strict=True)
            )
        else:
            sizes = task.training_sizes(rng, level)
        yield task.problem(rng, sizes)


def answer_of(text: str) -> str:
    """The words after the last `answer` of an output, up to its end; empty where there is none."""
    words = text.split()
    if EOS in words:
        words = words[: words.index(EOS)]
    if ANSWER not in words:
        return ""
    last = len(words) - 1 - words[::-1].index(ANSWER)
    return " ".join(words[last + 1 :])


# vocabulary and tokenizer


def _vocabulary() -> tuple[str, ...]:
    digits = [str(digit) for digit in range(10)]
    labels = [f"i{number}" for number in range(1, NUM_LABELS + 1)]
    phrases = " ".join(FILLER).split()
    ordered = [PAD, BOS, EOS, *digits, *LOWER, *UPPER, *labels, *GRAMMAR.split(), *phrases]
    return tuple(dict.fromkeys(ordered))


VOCABULARY = _vocabulary()
WORD_IDS: Mapping[str, int] = {word: number for number, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of words of the vocabulary, as the tokenizer of a trained reasoner gives them."""
    return [WORD_IDS[word] for word in text.split()]


# the grammars


def _joined(parts: Sequence[str]) -> str:
    """Parts with single spaces between their words; empty parts leave nothing."""
    return " ".join(part for part in parts if part)


def _two_digits(number: int) -> str:
    return f"{number // 10} {number % 10}"


def _chain(rng: random.Random, num_facts: int, num_hops: int) -> Written:
    """Nodes on a ring; every fact names the next node and a weight."""
    ring = rng.sample(UPPER, num_facts)
    follower = {node: ring[(place + 1) % num_facts] for place, node in enumerate(ring)}
    weight = {node: rng.randrange(10) for node in ring}
    at = rng.choice(ring)
    facts = [f"{node} {follower[node]} {weight[node]} ;" for node in rng.sample(ring, num_facts)]
    prompt = ["walk :", *facts, f"start {at} ; steps {_two_digits(num_hops)} . think :"]
    trace, total, notes = [], 0, list[int]()
    for hop in range(1, num_hops + 1):
        following, added = follower[at], weight[at]
        new = (total + added) % 10
        trace.append(
            f"hop {_two_digits(hop)} : fact {at} {following} {added} , "
            f"total {total} + {added} = {new} ."
        )
        if new % 2:
            trace.append(f"check : {new} - {added} is {total} , {at} to {following} , ok .")
        trace.append(FILLER[new])
        at, total = following, new
        if hop % 5 == 0:
            trace.append(f"note {LOWER[len(notes)]} : total {total} at {at} .")
            notes.append(total)
    trace.append("end . notes :")
    trace += [f"{LOWER[place]} {noted} ," for place, noted in enumerate(notes)]
    trace.append("sum")
    summed = 0
    for noted in notes:
        trace.append(f"{summed} + {noted} = {(summed + noted) % 10} ,")
        summed = (summed + noted) % 10
    return prompt, [*trace, f"{ANSWER} {at} {total} {summed}"]


def _bfs(rng: random.Random, num_nodes: int) -> Written:
    """A connected graph with long branches; drawn again until every distance has one digit."""
    while True:
        nodes = rng.sample(UPPER, num_nodes)
        near = _graph(rng, nodes)
        start = rng.choice(nodes)
        searched = _search(near, start)
        if searched is not None:
            break
    trace, distance, parent = searched
    furthest = max(distance.values())
    targets = [node for node in nodes if distance[node] >= max(2, furthest - 1)]
    target = rng.choice(targets) if targets else max(nodes, key=lambda node: distance[node])
    prompt = ["graph :"]
    prompt += [f"{node} has {' '.join(near[node])} ;" for node in rng.sample(nodes, num_nodes)]
    prompt.append(f"from {start} to {target} . think :")
    path = [target]
    while path[-1] != start:
        path.append(parent[path[-1]])
    steps_back = [f"{node} from {parent[node]} ," for node in path[:-1]]
    answer = f"{ANSWER} {distance[target]} : {' '.join(reversed(path))}"
    return prompt, [*trace, "back :", *steps_back, answer]


def _graph(rng: random.Random, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Neighbours of each node: a tree that grows at its young end, and a third more edges."""
    order = rng.sample(nodes, len(nodes))
    edges = {
        frozenset((order[place], order[rng.randrange(max(0, place - 4), place)]))
        for place in range(1, len(order))
    }
    while len(edges) < len(nodes) - 1 + len(nodes) // 3:
        edges.add(frozenset(rng.sample(nodes, 2)))
    near: dict[str, list[str]] = {node: [] for node in nodes}
    for one, other in sorted(sorted(edge) for edge in edges):
        near[one].append(other)
        near[other].append(one)
    for node in nodes:
        rng.shuffle(near[node])
    return near


def _search(
    near: Mapping[str, Sequence[str]], start: str
) -> tuple[list[str], dict[str, int], dict[str, str]] | None:
    """The search in words, distances and parents; None where a distance gets two digits."""
    distance, parent, queue = {start: 0}, dict[str, str](), [start]
    trace = []
    for place, node in enumerate(queue):  # the queue grows while it is read
        depth, num_new = distance[node], 0
        trace.append(f"take {node} ( {depth} ) . {node} has {' '.join(near[node])} .")
        for other in near[node]:
            if other in distance:
                trace.append(f"{other} is old .")
                continue
            if depth == 9:
                return None
            distance[other], parent[other] = depth + 1, node
            queue.append(other)
            num_new += 1
            trace.append(f"{other} is new from {node} ( {depth + 1} ) .")
        trace.append(FILLER[(len(near[node]) + 3 * num_new + depth) % 10])
        waiting = " ".join(queue[place + 1 :]) or "empty"
        trace.append(f"seen {' '.join(queue)} . queue {waiting} .")
    return trace, distance, parent


@dataclass(frozen=True, slots=True)
class _Instruction:
    """`target = left operator right`, then a jump by the parity of the result."""

    target: str
    left: str
    operator: str
    right: str
    if_even: str
    if_odd: str

    @property
    def words(self) -> str:
        return (
            f"{self.target} = {self.left} {self.operator} {self.right} , "
            f"{self.if_even} {self.if_odd}"
        )


def _machine(rng: random.Random, num_labels: int, num_registers: int, num_steps: int) -> Written:
    """Programs are drawn again until the run visits most labels."""
    registers = LOWER[:num_registers]
    labels = [f"i{number}" for number in range(1, num_labels + 1)]
    initial = {name: rng.randrange(10) for name in registers}
    while True:
        program = {}
        for label in labels:
            even, odd = rng.sample([other for other in labels if other != label], 2)
            target, left, right = (rng.choice(registers) for _ in range(3))
            program[label] = _Instruction(target, left, rng.choice("++--*"), right, even, odd)
        start = rng.choice(labels)
        trace, visited = _run(program, initial, start, num_steps)
        if len(visited) >= min(0.7 * num_labels, 0.5 * num_steps):
            break
    prompt = ["machine :"]
    prompt += [f"{name} is {initial[name]} ," for name in rng.sample(registers, num_registers)]
    prompt += [f"{label} : {program[label].words} ;" for label in labels]
    return [*prompt, f"start {start} ; steps {_two_digits(num_steps)} . think :"], trace


def _run(
    program: Mapping[str, _Instruction], initial: Mapping[str, int], at: str, num_steps: int
) -> tuple[list[str], set[str]]:
    """The run in words, and the labels that it visits."""
    value, trace, visited = dict(initial), list[str](), set[str]()
    for step in range(1, num_steps + 1):
        visited.add(at)
        code = program[at]
        left, right = value[code.left], value[code.right]
        new = _applied(code.operator, left, right)
        trace.append(
            f"step {_two_digits(step)} : {at} : {code.words} . "
            f"{code.left} is {left} , {code.right} is {right} , "
            f"{left} {code.operator} {right} = {new} , {code.target} is {new} ."
        )
        if code.operator == "+" and new % 2:
            trace.append(f"check : {new} - {right} is {left} , ok .")
        trace.append(FILLER[(new + 5) % 10])
        value[code.target] = new
        at = code.if_odd if new % 2 else code.if_even
        trace.append(f"{'odd' if new % 2 else 'even'} , go to {at} .")
    trace.append("end .")
    trace += [f"{name} is {value[name]} ," for name in initial]
    return [*trace, f"{ANSWER} {' '.join(str(value[name]) for name in initial)} {at}"], visited


def _applied(operator: str, left: int, right: int) -> int:
    """The last digit of the result, a digit also below zero."""
    results = {"+": left + right, "-": left - right, "*": left * right}
    return results[operator] % 10


@dataclass(frozen=True, slots=True)
class _LogicGate:
    left: str
    operator: str
    right: str


def _circuit(rng: random.Random, num_leaves: int, num_gates: int, num_goals: int) -> Written:
    """Gates over leaves and earlier gates; drawn again until the goals need most gates."""
    while True:
        names = rng.sample(UPPER, num_leaves + num_gates)
        leaves = {name: rng.randrange(10) for name in names[:num_leaves]}
        gates = {}
        for place in range(num_leaves, len(names)):
            left, right = _operands(rng, names[:place], num_leaves)
            gates[names[place]] = _LogicGate(left, rng.choice("++--*"), right)
        order = names[num_leaves:]
        chosen = set(rng.sample(order[:-1], min(num_goals, num_gates) - 1)) | {order[-1]}
        goals = [name for name in order if name in chosen]  # later ones use what earlier ones found
        trace, value = _evaluate(leaves, gates, goals)
        if len(value) >= num_leaves + 0.75 * num_gates:
            break
    facts = [f"{name} is {digit} ;" for name, digit in leaves.items()]
    facts += [
        f"{name} : {gate.left} {gate.operator} {gate.right} ;" for name, gate in gates.items()
    ]
    rng.shuffle(facts)
    prompt = ["circuit :", *facts, f"goals {' '.join(goals)} . think :"]
    ending = [f"{name} is {value[name]} ," for name in goals]
    answer = f"{ANSWER} {' '.join(str(value[name]) for name in goals)}"
    return prompt, [*trace, "end .", *ending, answer]


def _operands(rng: random.Random, earlier: Sequence[str], num_leaves: int) -> tuple[str, str]:
    """Two nodes; half of them are one of the three latest gates, so that circuits get deep."""
    found: list[str] = []
    while len(found) < 2:
        latest = earlier[max(num_leaves, len(earlier) - 3) :]
        node = rng.choice(latest if latest and rng.random() < 0.5 else earlier)
        if node not in found:
            found.append(node)
    return found[0], found[1]


def _evaluate(
    leaves: Mapping[str, int], gates: Mapping[str, _LogicGate], goals: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """The evaluation in words, and the value of every node that has one at its end."""
    value, trace = dict(leaves), list[str]()
    for goal in goals:
        if goal in value:
            trace.append(f"goal {goal} is {value[goal]} .")
            continue
        trace.append(f"goal {goal} open , push {goal} . stack {goal} .")
        stack = [goal]
        while stack:
            node = stack[-1]
            gate = gates[node]
            trace.append(f"take {node} : {gate.left} {gate.operator} {gate.right} ,")
            missing = None
            for operand in (gate.left, gate.right):
                if operand not in value:
                    missing = operand
                    break
                trace.append(f"{operand} is {value[operand]} ,")
            if missing is not None:
                stack.append(missing)
                trace.append(f"{missing} open , push {missing} . stack {' '.join(stack)} .")
                continue
            left, right = value[gate.left], value[gate.right]
            new = _applied(gate.operator, left, right)
            trace.append(f"{left} {gate.operator} {right} = {new} , {node} is {new} .")
            if gate.operator == "+" and new % 2:
                trace.append(f"check : {new} - {right} is {left} , ok .")
            trace.append(FILLER[new])
            value[node] = new
            stack.pop()
            trace.append(f"stack {' '.join(stack) or 'empty'} .")
    return trace, value


TASKS: Mapping[str, EvaluationTask] = {
    task.name: task
    for task in (
        EvaluationTask(
            "chain",
            "walk along facts, keep a running total, sum its notes",
            ("facts", "hops"),
            (3, 3),
            {1: (8, 12), 2: (12, 20), 3: (16, 30), 4: (8, 30)},
            _chain,
        ),
        EvaluationTask(
            "bfs",
            "breadth-first search, then the path back",
            ("nodes",),
            (4,),
            {1: (9,), 2: (13,), 3: (18,)},
            _bfs,
        ),
        EvaluationTask(
            "machine",
            "run a register machine with jumps",
            ("labels", "registers", "steps"),
            (3, 2, 2),
            {1: (6, 4, 10), 2: (8, 5, 16), 3: (10, 6, 20), 4: (5, 4, 20)},
            _machine,
        ),
        EvaluationTask(
            "circuit",
            "evaluate gates depth first, each once",
            ("leaves", "gates", "goals"),
            (2, 2, 1),
            {1: (4, 7, 2), 2: (6, 12, 3), 3: (7, 18, 4)},
            _circuit,
        ),
    )
}
