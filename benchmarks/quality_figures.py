"""What was lost, in figures: perplexity and greedy agreement with their standard errors over texts, and their table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.quality_judging import Judged

CONTROL = "random"  # what any other scorer has to beat
MISSING = "-"


@dataclass(frozen=True)
class Mean:
    """A mean over the places of all texts, and its standard error (None: one text tells nothing of it)."""

    value: float
    error: float | None


def mean_over_texts(sums: torch.Tensor, counts: torch.Tensor) -> Mean:
    """The mean of places of which text i has `counts[i]`, adding up to `sums[i]`.

    Places of one text depend on each other, so it is texts that are drawn: the error is that of a ratio of two means
    over texts (linearised; W. G. Cochran, Sampling Techniques, chapter 6).
    """
    counts = counts.double()
    total = float(counts.sum())
    value = float(sums.sum()) / total
    num_texts = len(sums)
    if num_texts < 2:
        return Mean(value, None)
    rests = sums - value * counts
    return Mean(value, math.sqrt(num_texts / (num_texts - 1) * float((rests**2).sum())) / total)


def first_places(prompt_lengths: Sequence[int], budget: int, block_size: int) -> list[int]:
    """For each text the first place whose prediction reads a compressed cache: its budget and one block are full."""
    full = -(-budget // block_size) * block_size + block_size
    return [max(full - length + 1, 1) for length in prompt_lengths]


def compare(full: Judged, other: Judged, first_place: Sequence[int]) -> dict[str, Any]:
    """Figures over each text's places from `first_place` on.

    Perplexity under both, their ratio, the share of equal most probable tokens; `_error` is a standard error over
    texts. `by_text` has what they are made of: number of places, mean losses, equal tokens.
    """
    kept = [slice(start, None) for start in first_place]
    full_losses = [losses[part].double() for losses, part in zip(full.losses, kept, strict=True)]
    losses = [losses[part].double() for losses, part in zip(other.losses, kept, strict=True)]
    pairs = zip(full.most_probable, other.most_probable, kept, strict=True)
    equal = torch.tensor([int((one[part] == two[part]).sum()) for one, two, part in pairs])
    counts = torch.tensor([len(part) for part in losses])
    full_sums = torch.stack([part.sum() for part in full_losses])
    sums = torch.stack([part.sum() for part in losses])
    worse = mean_over_texts(sums - full_sums, counts)
    agreement = mean_over_texts(equal.double(), counts)
    return {
        "places": int(counts.sum()),
        "perplexity_full": math.exp(mean_over_texts(full_sums, counts).value),
        "perplexity": math.exp(mean_over_texts(sums, counts).value),
        "ratio": math.exp(worse.value),
        "ratio_error": None if worse.error is None else math.exp(worse.value) * worse.error,
        "greedy_agreement": agreement.value,
        "greedy_agreement_error": agreement.error,
        "by_text": {
            "places": counts.tolist(),
            "loss_full": (full_sums / counts).tolist(),
            "loss": (sums / counts).tolist(),
            "equal": equal.tolist(),
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """A result of `benchmarks.quality` as Markdown, for docs/LOG.md: a line on what was measured, then its rows."""
    rows = result["rows"]
    controls = {row["budget"]: row for row in rows if row["scorer"] == CONTROL}
    head = (
        "budget", "scorer", "places", "perplexity of full KV", "perplexity", "ratio", "equal greedy tokens",
        f"texts with less loss than {CONTROL}", "compressions",
    )  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head)), *(_row(row, controls.get(row["budget"])) for row in rows)]
    return "\n".join((_described(result), "", *lines))


def _row(row: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    return _line(
        (
            row["budget"],
            row["scorer"],
            f"{row['places']:,}",
            f"{row['perplexity_full']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{row['ratio']:.3f}{_spread(row['ratio_error'], '.3f')}",
            f"{row['greedy_agreement']:.1%}{_spread(row['greedy_agreement_error'], '.1%')}",
            _better(row, control),
            row["compressions"],
        )
    )


def _described(result: Mapping[str, Any]) -> str:
    given, texts = result["arguments"], result["texts"]
    ended = sorted(texts["tokens_before_end"])
    left_out = [f"{each['scorer']} at {each['budget']}" for each in result["left_out"]]
    parts = [
        f"{result['date']}, {result['card']}, {given['model']} in {given['dtype']}, seed {given['seed']}: {len(ended)} "
        f"texts of {given['length']:,} tokens, ends of text ignored (the first after {ended[len(ended) // 2]:,} tokens "
        f"in the median); blocks of {given['block_size']}, window {given['window']}; {result['wall_s']:.0f} s; ± is a "
        "standard error over texts"
    ]
    if left_out:
        parts.append(f"not measured for want of time: {', '.join(left_out)}")
    return ". ".join(parts) + "."


def _better(row: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    if control is None or control is row:
        return MISSING
    pairs = list(zip(row["by_text"]["loss"], control["by_text"]["loss"], strict=True))
    return f"{sum(own < theirs for own, theirs in pairs)} of {len(pairs)}"


def _spread(error: float | None, form: str) -> str:
    return "" if error is None else f" ± {error:{form}}"


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
