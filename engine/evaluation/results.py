"""Figures of an evaluation: pass@1 with intervals, paired differences, lengths, as JSON.

The unit is the problem: several samples of one problem are no independent trials. So an interval's
number of trials is the effective one, and differences between columns are taken within problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FORMAT = "zlab-evaluation/1"
CONFIDENCE = 0.95
Z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
CAPPED = "length"  # finish reason of an output that met the cap
Counts = NDArray[np.int64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class ModelOutput:
    """One output of one problem.

    Attributes:
        problem: the problem's number over all data of the evaluation.
        sample: 0 for the first output of the problem.
        text: what was written.
        tokens: output tokens.
        finish: "stop", "length", or what else the server says.
        compressions: of this output; None where the server does not say.
    """

    problem: int
    sample: int
    text: str
    tokens: int
    finish: str
    compressions: int | None = None


@dataclass(frozen=True)
class EvaluatedColumn:
    """What is evaluated on all problems: a policy (or a server), a budget, a way to sample.

    Attributes:
        name: unique, for people.
        policy: as a command line names it, budget included; empty for a server.
        scorer: of the compression; empty where nothing is compressed, or for a server.
        temperature: 0 takes the most probable token.
        samples: outputs a problem.
        budget: kept tokens of a compressed request; None where nothing is compressed.
        ratio: the budget as a share of the baseline's mean output, where it was given so.
        server: address of the server; empty for the own engine.
    """

    name: str
    policy: str
    scorer: str
    temperature: float
    samples: int
    budget: int | None = None
    ratio: float | None = None
    server: str = ""


@dataclass
class Answered:
    """A column's outputs, checked, and the time they took."""

    column: EvaluatedColumn
    outputs: list[ModelOutput] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    wall_s: float = 0.0
    timed_tokens: int = 0  # output tokens of the time in `wall_s`


@dataclass(frozen=True)
class Share:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        """The interval for JSON."""
        return [self.low, self.high]


def wilson(share: float, trials: float) -> Interval:
    """Wilson's score interval (1927) of a share of `trials`, which need not be a whole number."""
    centre = share + Z**2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    scale = 1 + Z**2 / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def pass_share(right: Counts, trials: Counts) -> Share:
    """Mean over problems of the share of right outputs.

    The interval is Wilson's over the effective number of outputs (Kish's design effect): all of
    them where samples of a problem differ as much as those of different problems, the number of
    problems where they are alike.

    Args:
        right: right outputs of each problem.
        trials: outputs of each problem, at least 1.
    """
    shares = right / trials
    value, problems, outputs = float(shares.mean()), len(shares), int(trials.sum())
    effective = float(problems)
    spread = float(shares.var(ddof=1)) / problems if problems > 1 else 0.0
    if outputs > problems and spread > 0:
        effective = min(max(value * (1 - value) / spread, problems), outputs)
    return Share(value, *wilson(value, effective))


@dataclass(frozen=True)
class Comparison:
    """A column against the baseline on the same problems.

    Attributes:
        difference: of pass@1, with its interval: Newcombe's paired score interval (1998, method 10)
            for one output a problem, else Student's t over the problems' differences.
        ratio: pass@1 as a share of the baseline's, the interval that of the difference; None where
            the baseline solved nothing.
        gained, lost: outputs right here and wrong there, and the other way round; of several
            samples the first with the first, and so on.
        p_value: exact McNemar test for one output a problem, else its form for clustered pairs
            (Obuchowski 1998).
    """

    difference: Share
    ratio: Share | None
    gained: int
    lost: int
    p_value: float


def compare(right: NDArray[np.bool_], baseline: NDArray[np.bool_]) -> Comparison:
    """Paired outputs `[problems, samples]` of both columns.

    Args:
        right: whether each output of the column is right.
        baseline: the same of the baseline.
    """
    gained, lost = int((right & ~baseline).sum()), int((~right & baseline).sum())
    own, other = float(right.mean()), float(baseline.mean())
    if right.shape[1] == 1:
        difference = _newcombe(right[:, 0], baseline[:, 0])
        apart = gained + lost
        p_value = float(stats.binomtest(min(gained, lost), apart).pvalue) if apart else 1.0
    else:
        by_problem = right.mean(axis=1) - baseline.mean(axis=1)
        difference = _student(by_problem)
        counts = right.sum(axis=1) - baseline.sum(axis=1)
        squares = float((counts**2).sum())
        p_value = float(stats.chi2.sf(float(counts.sum()) ** 2 / squares, 1)) if squares else 1.0
    ratio = None
    if other > 0:
        low, high = (max(0.0, (other + bound) / other) for bound in difference.as_list())
        ratio = Share(own / other, low, high)
    return Comparison(difference, ratio, gained, lost, p_value)


def _newcombe(right: NDArray[np.bool_], baseline: NDArray[np.bool_]) -> Share:
    """Difference of paired shares (Newcombe, Statistics in Medicine 17, 1998, method 10)."""
    count = len(right)
    own, other = float(right.mean()), float(baseline.mean())
    both, neither = int((right & baseline).sum()), int((~right & ~baseline).sum())
    gained, lost = int((right & ~baseline).sum()), int((~right & baseline).sum())
    margins = (both + lost) * (both + gained) * (neither + lost) * (neither + gained)
    product = both * neither - gained * lost
    # The paper's continuity correction of phi.
    corrected = max(product - count / 2, 0.0) if product > 0 else float(product)
    phi = corrected / math.sqrt(margins) if margins else 0.0
    own_low, own_high = wilson(own, count)
    other_low, other_high = wilson(other, count)
    value = own - other

    def reach(one: float, two: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * two + two**2))

    below = reach(own - own_low, other_high - other)
    above = reach(own_high - own, other - other_low)
    return Share(value, value - below, value + above)


def _student(values: NDArray[np.float64]) -> Share:
    """Mean with Student's t interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return Share(mean, -math.inf, math.inf)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * error
    return Share(mean, mean - half, mean + half)


def length_ratio(own: NDArray[np.float64], other: NDArray[np.float64]) -> Share:
    """How much longer outputs are: ratio of mean lengths on the same problems.

    The interval is the delta method's over problems (Student's t).

    Args:
        own: mean output tokens of each problem.
        other: the same of the baseline.
    """
    value = float(own.mean() / other.mean())
    residual = _student((own - value * other) / float(other.mean()))
    return Share(value, value + residual.low, value + residual.high)


# from outputs to figures


def figures(
    answered: Answered, sources: Sequence[int], names: Sequence[str], baseline: Answered | None
) -> dict[str, Any]:
    """The figures of one column as JSON: over all problems, and under "data" for each source.

    Args:
        answered: the column's outputs; every problem has as many as the column has samples.
        sources: for each problem, the number of its source.
        names: names of the sources.
        baseline: what is compared with, of as many samples; None for the baseline itself.
    """
    column = answered.column
    places = np.array(sources)
    found: dict[str, Any] = {
        "name": column.name,
        "policy": column.policy,
        "server": column.server,
        "scorer": column.scorer,
        "budget_tokens": column.budget,
        "budget_ratio": column.ratio,
        "temperature": column.temperature,
        "samples": column.samples,
        **_part(answered, baseline, np.ones(len(places), bool)),
        "wall_s": answered.wall_s,
        "tokens_per_s": answered.timed_tokens / answered.wall_s if answered.wall_s else None,
        "data": {},
    }
    for number, name in enumerate(names):
        found["data"][name] = _part(answered, baseline, places == number)
    return found


def _part(
    answered: Answered, baseline: Answered | None, chosen: NDArray[np.bool_]
) -> dict[str, Any]:
    """Figures over some of the problems."""
    right, tokens = _by_problem(answered, chosen)
    outputs = [one for one in answered.outputs if chosen[one.problem]]
    compressions = [one.compressions for one in outputs if one.compressions is not None]
    share = pass_share(right.sum(axis=1), np.full(len(right), right.shape[1]))
    part: dict[str, Any] = {
        "problems": len(right),
        "outputs": len(outputs),
        "right": int(right.sum()),
        "pass_at_1": share.value,
        "pass_at_1_interval": share.as_list(),
        "mean_output_tokens": float(tokens.mean()),
        "share_at_cap": sum(one.finish == CAPPED for one in outputs) / len(outputs),
        "compressions_per_output": sum(compressions) / len(compressions) if compressions else None,
        "of_baseline": None,
    }
    if baseline is None:
        return part
    other_right, other_tokens = _by_problem(baseline, chosen)
    compared = compare(right, other_right)
    ratio = length_ratio(tokens.mean(axis=1), other_tokens.mean(axis=1))
    part["of_baseline"] = {
        "baseline": baseline.column.name,
        "difference": compared.difference.value,
        "difference_interval": compared.difference.as_list(),
        "ratio": compared.ratio and compared.ratio.value,
        "ratio_interval": compared.ratio and compared.ratio.as_list(),
        "gained": compared.gained,
        "lost": compared.lost,
        "p_value": compared.p_value,
        "length_ratio": ratio.value,
        "length_ratio_interval": ratio.as_list(),
    }
    return part


def _by_problem(
    answered: Answered, chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Right or not, and output tokens, of the chosen problems `[problems, samples]`."""
    rows = np.cumsum(chosen) - 1  # of each chosen problem
    shape = (int(chosen.sum()), answered.column.samples)
    right, tokens = np.zeros(shape, bool), np.zeros(shape)
    for output, is_right in zip(answered.outputs, answered.right, strict=True):
        if chosen[output.problem]:
            place = rows[output.problem], output.sample
            right[place], tokens[place] = is_right, output.tokens
    return right, tokens
