"""Run an evaluation: plan its columns, keep every output in a journal, go on where it stopped.

An evaluation is a folder with two files. `journal.jsonl` begins with the settings and gets one line
an output as soon as it is complete; `results.json` is made of it at the end. A run with the same
settings reads the journal and evaluates only what is missing; other settings are refused. The
journal keeps texts, not verdicts: answers are checked anew, so a checker may be mended meanwhile.

    plan:     baseline first, then every policy at every budget, all at every temperature
    column:   a policy at a budget and a temperature; all problems, all samples
    backend:  the own engine (`local.py`) or servers (`remote.py`)
"""

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, TextIO

from zlab.engine.errors import EngineError
from zlab.engine.evaluation.dataset import CheckerError, Dataset, Example, judge
from zlab.engine.evaluation.results import FORMAT, Answered, EvaluatedColumn, ModelOutput, figures
from zlab.policies.core.policy import Policy
from zlab.policies.spec import load_policy, with_setting

JOURNAL = "journal.jsonl"
RESULTS = "results.json"
JOURNAL_FORMAT = "zlab-evaluation-journal/1"
TOKENS = "budget.tokens"
DEFAULT_FOLDER = Path("runs")

Progress = Callable[[int, str], None]  # outputs done in all columns, name of the column


class EvaluationError(EngineError):
    """An evaluation that cannot be run, or not gone on with; the message says why."""


class RunError(EngineError):
    """A request that failed in the middle of an evaluation; the message names its row."""


@dataclass(frozen=True)
class KeptTokens:
    """A number of kept tokens, or a share of the baseline's mean output."""

    written: str
    tokens: int | None = None
    ratio: Fraction | None = None

    @staticmethod
    def parse(text: str) -> "KeptTokens":
        """`512`, `1/4`, `0.25` or `25%`. Raises EvaluationError."""
        written = text.strip()
        try:
            percent = Fraction(1, 100) if written.endswith("%") else Fraction(1)
            value = Fraction(written.removesuffix("%")) * percent
        except (ValueError, ZeroDivisionError) as error:
            raise EvaluationError(_no_budget(text)) from error
        is_ratio = percent != 1 or "/" in written or "." in written
        if value <= 0 or (is_ratio and value > 1):
            raise EvaluationError(_no_budget(text))
        return (
            KeptTokens(written, ratio=value) if is_ratio else KeptTokens(written, tokens=int(value))
        )


def _no_budget(text: str) -> str:
    return (
        f"budget {text!r} must be a number of tokens (512) or a share of the baseline's mean "
        "output above 0 and at most 1 (1/4, 0.25, 25%)"
    )


@dataclass(frozen=True)
class Question:
    """One output that is asked for: the problem, which sample of it, and the seed of its draws."""

    problem: int
    sample: int
    seed: int
    example: Example


class AnswerSource(Protocol):
    """What answers questions."""

    def describe(self) -> Mapping[str, Any]:
        """What identifies it for the settings of a journal."""

    def check(self, columns: Sequence[EvaluatedColumn], examples: Sequence[Example]) -> None:
        """Raise EngineError where a column or an example can never be answered, before any is."""

    def answer(
        self, column: EvaluatedColumn, questions: Sequence[Question]
    ) -> Iterator[ModelOutput]:
        """The outputs in the order in which they are complete."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated.

    Attributes:
        baseline: the policy that others are compared with.
        policies: the others.
        budgets: for each policy that has a budget of tokens; empty leaves policies as they are.
        temperatures: 0 for greedy; each gives columns of its own.
        samples: outputs a problem where the temperature is above 0.
        top_p, seed, max_tokens: of every output.
        servers: addresses, where servers are evaluated and not policies; the first is the baseline.
        block_size: budgets that are a ratio are rounded up to whole blocks.
    """

    baseline: str
    policies: tuple[str, ...]
    budgets: tuple[KeptTokens, ...]
    temperatures: tuple[float, ...]
    samples: int
    top_p: float
    seed: int
    max_tokens: int
    servers: tuple[str, ...] = ()
    block_size: int = 1

    def check_budgets(self) -> None:
        """Raise EvaluationError for budgets that no policy takes, or that would be rounded."""
        if not self.budgets:
            return
        written = ", ".join(one.written for one in self.budgets)
        if self.servers:
            raise EvaluationError(f"budgets {written} are for policies, not for servers")
        if not any(map(takes_budget, self.policies)):
            policies = ", ".join(self.policies) or self.baseline
            raise EvaluationError(
                f"budgets {written} need a policy with a budget of tokens, not {policies}"
            )
        for budget in self.budgets:
            if budget.tokens is not None and budget.tokens % self.block_size:
                raise EvaluationError(
                    f"budget {budget.written} must be a multiple of the block size "
                    f"{self.block_size}: whole blocks are kept"
                )

    def baselines(self) -> list[EvaluatedColumn]:
        """The first columns, one a temperature."""
        if self.servers:
            return [self._column("", self.servers[0], heat) for heat in self.temperatures]
        return [self._column(self.baseline, "", heat) for heat in self.temperatures]

    def others(self, mean_output: float) -> list[EvaluatedColumn]:
        """All other columns, once the baseline's mean output is known."""
        if self.servers:
            return [
                self._column("", server, heat)
                for server in self.servers[1:]
                for heat in self.temperatures
            ]
        return [
            self._column(spec, "", heat, budget, mean_output)
            for spec in self.policies
            for budget in (self.budgets if takes_budget(spec) and self.budgets else (None,))
            for heat in self.temperatures
        ]

    def _column(
        self,
        spec: str,
        server: str,
        temperature: float,
        budget: KeptTokens | None = None,
        mean_output: float = 0.0,
    ) -> EvaluatedColumn:
        ratio = None
        if budget is not None:
            tokens = budget.tokens
            if budget.ratio is not None:
                ratio = float(budget.ratio)
                blocks = -(-budget.ratio * Fraction(mean_output) // self.block_size)
                tokens = int(blocks) * self.block_size
            spec = with_budget(spec, tokens)
        name = server or spec
        if len(self.temperatures) > 1 or temperature > 0:
            name = f"{name} @ {temperature:g}"
        policy = None if server else load_policy(spec)
        return EvaluatedColumn(
            name=name,
            policy=spec,
            scorer=_scorer(policy),
            temperature=temperature,
            samples=self.samples if temperature > 0 else 1,
            budget=kept_tokens(policy, self.block_size),
            ratio=ratio,
            server=server,
        )


def with_budget(spec: str, tokens: int | None) -> str:
    """The policy with room for so many kept tokens, whatever budget it had."""
    if getattr(load_policy(spec).budget, "blocks", 0):
        spec = with_setting(spec, "budget.blocks", 0)
    return with_setting(spec, TOKENS, tokens)


def takes_budget(spec: str) -> bool:
    """Whether the policy has a budget of tokens. Raises PolicyError for a policy that is none."""
    return hasattr(load_policy(spec).budget, "tokens")


def kept_tokens(policy: Policy | None, block_size: int) -> int | None:
    """Tokens that a compression leaves a request; None where it is never compressed."""
    blocks = policy.budget.floor(block_size) if policy is not None else None
    return None if blocks is None else (blocks - 1) * block_size


def _scorer(policy: Policy | None) -> str:
    if policy is None or policy.budget.floor(1) is None:
        return ""
    return policy.compression.scorer


# the journal


class OutputJournal:
    """Every output of an evaluation, on disk as soon as it is complete.

    A line is the header (settings), an output (under "output", of the column "column"), or what a
    session took of a column ("wall_s" for "tokens"). A last line that was cut off by a crash is
    dropped; any other line that cannot be read is an error.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or begin the journal in `folder`.

        Raises:
            EvaluationError: the folder holds an evaluation with other settings, or something else.
        """
        self.path = folder / JOURNAL
        self.outputs: dict[str, dict[tuple[int, int], ModelOutput]] = {}
        self.times: dict[str, tuple[float, int]] = {}
        plain = json.loads(json.dumps(settings))
        if self.path.exists():
            self._read(plain)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise EvaluationError(
                f"--out {folder}: is not empty and holds no {JOURNAL} to go on with"
            )
        self._file: TextIO | None = None  # opened by the first line
        if not self.path.exists() or self.path.stat().st_size == 0:
            self._header: dict[str, Any] | None = {"format": JOURNAL_FORMAT, "settings": plain}
        else:
            self._header = None

    def _read(self, settings: Mapping[str, Any]) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a line that a crash cut off
            self.path.write_bytes(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if number == 1:
                    self._check(row, settings)
                elif "output" in row:
                    output = ModelOutput(**row["output"])
                    found = self.outputs.setdefault(row["column"], {})
                    found[output.problem, output.sample] = output
                else:
                    self._add_time(row["column"], row["wall_s"], row["tokens"])
            except EvaluationError:
                raise
            except (ValueError, TypeError, KeyError) as error:
                raise EvaluationError(f"{self.path}:{number}: cannot be read: {error!r}") from error

    def _check(self, header: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        if header.get("format") != JOURNAL_FORMAT:
            raise EvaluationError(f"{self.path}: is no journal of an evaluation ({JOURNAL_FORMAT})")
        before = header["settings"]
        apart = [
            f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted({*before, *settings})
            if before.get(name) != settings.get(name)
        ]
        if apart:
            raise EvaluationError(
                f"{self.path.parent} holds an evaluation with other settings: {'; '.join(apart)}; "
                "take them, or another --out"
            )

    def add(self, column: EvaluatedColumn, output: ModelOutput) -> None:
        """Keep an output; it is in the file when this returns."""
        self.outputs.setdefault(column.name, {})[output.problem, output.sample] = output
        self._write({"column": column.name, "output": asdict(output)})

    def add_time(self, column: EvaluatedColumn, wall_s: float, tokens: int) -> None:
        """Keep how long a session worked on a column, and the output tokens of that time."""
        self._add_time(column.name, wall_s, tokens)
        self._write({"column": column.name, "wall_s": wall_s, "tokens": tokens})

    def _add_time(self, name: str, wall_s: float, tokens: int) -> None:
        seconds, before = self.times.get(name, (0.0, 0))
        self.times[name] = seconds + wall_s, before + tokens

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        if self._header is not None:
            self._file.write(json.dumps(self._header) + "\n")
            self._header = None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; another line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


# the run


class Evaluation:
    """A plan, its data and what answers, with everything that was evaluated so far."""

    def __init__(
        self,
        plan: Plan,
        data: Sequence[Dataset],
        backend: AnswerSource,
        folder: Path | None = None,
        progress: Progress = lambda done, name: None,
    ) -> None:
        """Check all that can be checked before the first output, then open the journal.

        Args:
            plan: what is evaluated.
            data: on what.
            backend: what answers.
            folder: where journal and results go, new or that of an interrupted run; by default one
                under `runs` that is named by the settings.
            progress: is called for every output; it may raise KeyboardInterrupt.

        Raises:
            EngineError: a policy, a budget or a row that can never be answered.
            EvaluationError: the plan has nothing to compare, or the folder holds another one.
        """
        self.plan, self.data, self.backend = plan, data, backend
        self.progress = progress
        self._examples = [example for one in data for example in one.examples]
        self._sources = [number for number, one in enumerate(data) for _ in one.examples]
        plan.check_budgets()
        columns = [*plan.baselines(), *plan.others(mean_output=1.0)]  # ratios are not known yet
        sure = [column for column in columns if column.ratio is None]
        names = [column.name for column in sure]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EvaluationError(f"{twice!r} would be evaluated twice")
        self.num_outputs = len(self._examples) * sum(column.samples for column in columns)
        backend.check(sure, self._examples)
        settings = self.settings()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.folder = folder or DEFAULT_FOLDER / f"evaluation-{digest[:8]}"
        self.journal = OutputJournal(self.folder, settings)
        self._num_done = 0  # outputs of the columns before the one under way

    def settings(self) -> dict[str, Any]:
        """All that decides an output, for the journal's header."""
        plan = asdict(replace(self.plan, budgets=()))
        plan["budgets"] = [one.written for one in self.plan.budgets]
        data = [[one.source, len(one.examples), one.sha256] for one in self.data]
        return {**plan, "data": data, **self.backend.describe()}

    def run(self) -> dict[str, Any]:
        """Evaluate what is missing; returns and writes the results.

        Raises:
            CheckerError: some outputs could not be checked; all outputs are in the journal.
            RunError: a request failed; what was complete is kept.
            EngineError: a budget that is a ratio turns out too small; what was complete is kept.
            KeyboardInterrupt: `progress` raised it; what was complete is kept.
        """
        try:
            baselines = self.plan.baselines()
            for column in baselines:
                self._evaluate(column)
            others = self.plan.others(self._mean_output(baselines[0]))
            others = list({column.name: column for column in others}.values())  # equal ratios
            self.backend.check(others, self._examples)
            for column in others:
                self._evaluate(column)
            return self._results([*baselines, *others], baselines)
        finally:
            self.journal.close()

    def _mean_output(self, column: EvaluatedColumn) -> float:
        outputs = self.journal.outputs[column.name].values()
        return sum(one.tokens for one in outputs) / len(outputs)

    def _questions(self, column: EvaluatedColumn) -> list[Question]:
        done = self.journal.outputs.get(column.name, {})
        return [
            Question(problem, sample, _seed(self.plan.seed, problem, sample), example)
            for problem, example in enumerate(self._examples)
            for sample in range(column.samples)
            if (problem, sample) not in done
        ]

    def _evaluate(self, column: EvaluatedColumn) -> None:
        questions = self._questions(column)
        total = len(self._examples) * column.samples
        if not questions:
            self._num_done += total
            return
        num_before = self._num_done + total - len(questions)
        tokens, began = 0, time.perf_counter()
        try:
            self.progress(num_before, column.name)
            for count, output in enumerate(self.backend.answer(column, questions), start=1):
                self.journal.add(column, output)
                tokens += output.tokens
                self.progress(num_before + count, column.name)
        finally:
            self._num_done += total
            if tokens:
                self.journal.add_time(column, time.perf_counter() - began, tokens)

    def _results(
        self, columns: Sequence[EvaluatedColumn], baselines: Sequence[EvaluatedColumn]
    ) -> dict[str, Any]:
        answered = self._check_answers(columns)
        names = [one.name for one in self.data]
        by_heat = {one.temperature: answered[one.name] for one in baselines}
        rows = [
            figures(
                answered[column.name],
                self._sources,
                names,
                None if column in baselines else by_heat[column.temperature],
            )
            for column in columns
        ]
        found = {
            "format": FORMAT,
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.backend.describe(),
            "data": [
                {
                    "name": one.name,
                    "source": one.source,
                    "problems": len(one.examples),
                    "check": one.checker.name,
                    "sha256": one.sha256,
                }
                for one in self.data
            ],
            "seed": self.plan.seed,
            "top_p": self.plan.top_p,
            "max_tokens": self.plan.max_tokens,
            "columns": rows,
        }
        whole = self.folder / RESULTS
        whole.with_suffix(".part").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        whole.with_suffix(".part").replace(whole)
        return found

    def _check_answers(self, columns: Sequence[EvaluatedColumn]) -> dict[str, Answered]:
        """Every output of every column, checked. Raises CheckerError after all have been tried."""
        checkers = [one.checker for one in self.data]
        found, errors = {}, list[CheckerError]()
        for column in columns:
            outputs = list(self.journal.outputs[column.name].values())
            wall_s, tokens = self.journal.times.get(column.name, (0.0, 0))
            right = []
            for output in outputs:
                checker = checkers[self._sources[output.problem]]
                try:
                    right.append(judge(checker, output.text, self._examples[output.problem]))
                except CheckerError as error:
                    errors.append(error)
            found[column.name] = Answered(column, outputs, right, wall_s, tokens)
        if errors:
            more = f" (and {len(errors) - 1:,} more)" if len(errors) > 1 else ""
            raise CheckerError(
                f"{errors[0]}{more}; all outputs are kept in {self.folder / JOURNAL}: mend the "
                "checker and run the same command again"
            )
        return found


def _seed(seed: int, problem: int, sample: int) -> int:
    """Of one output's draws: the same in every column."""
    return zlib.crc32(f"{seed} {problem} {sample}".encode())
