"""What `benchmarks.judge_simulator` writes: measured and simulated, by profile and by roofline, small enough to keep.

Every run is one line of the file. Floats have five significant digits; errors are (simulated - measured) / measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from benchmarks.run_figures import rounded
from sim.recorded import RecordedRun
from sim.trust import GOALS, Trust, event_words
from zlab.judged import Judged, as_document

ROWS = ("validation", "grid", "not_run", "not_judged", "calls")
IN_FIGURES = ("run", "policy", "complete", "pool_blocks", "host_blocks", "ttft_s", "tpot_s", "e2e_s", "digest")
SHORT = 16  # of a digest


def run_document(judged: Judged, measured: Mapping[str, Any] | None, with_time: bool = True) -> dict[str, Any]:
    """One run. `measured`: its row in runs.json; `with_time`: and how it went over time.

    `error`, `lacking_share` and the outliers are the profile's, `roofline_error` is that of the card's roofline alone.
    """
    profile, roofline, run = judged.with_profile, judged.with_roofline, judged.run
    assert profile is not None
    assert roofline is not None
    left_out = IN_FIGURES if with_time else (*IN_FIGURES, "over_time")
    return {
        "run": judged.folder.name,
        "policy": (measured or {}).get("policy", run.manifest["policy"]),
        "policy_digest": run.manifest["policy_digest"][:SHORT],
        "num_blocks": run.limits.num_blocks,
        "host_blocks": run.limits.host_blocks,
        "num_requests": run.requests.num_rows,
        "complete": run.complete,
        "planned_ahead": run.planned_ahead,
        "decisions": _decisions(profile),
        "figures": _figures(profile, roofline),
        "steps": _steps(profile, roofline),
        "pinned_makespan": {
            "error": profile.pinned_makespan.error,
            "roofline_error": roofline.pinned_makespan.error,
            "idle_s": profile.idle_s,
        },
        "outliers": [asdict(outlier) for outlier in profile.outliers],
        "notes": list(judged.notes),
        "measured": {name: value for name, value in (measured or {}).items() if name not in left_out},
    }


def _decisions(found: Trust) -> dict[str, Any]:
    decisions, difference = found.decisions, found.decisions.difference
    words = None if difference is None else f"{event_words(difference.left)} | {event_words(difference.right)}"
    return {
        "how": decisions.how,
        "equal": decisions.equal,
        "digest": decisions.engine_digest[:SHORT],
        "difference": words and f"step {difference.step if difference else -1}: engine | simulator: {words}",
        "free_differs_at": decisions.free_differs_at,
    }


def _figures(profile: Trust, roofline: Trust) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "measured": compared.measured,
            "profile": compared.simulated,
            "error": compared.error,
            "met": compared.met,
            "roofline": roofline.figures[name].simulated,
            "roofline_error": roofline.figures[name].error,
        }
        for name, compared in profile.figures.items()
    }


def _steps(profile: Trust, roofline: Trust) -> dict[str, dict[str, Any]]:
    return {
        kind: {**asdict(error), "error": error.error, "roofline_error": roofline.steps[kind].error}
        for kind, error in profile.steps.items()
    }


def goals(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """By figure: its goal, in how many runs it was met, in how many there is one, and the worst error of all."""
    found: dict[str, dict[str, Any]] = {}
    for name, goal in GOALS.items():
        compared = [each.chief.figures[name] for each in judged]
        errors = [one.error for one in compared if one.error is not None]
        found[name] = {
            "goal": goal,
            "met": sum(bool(one.met) for one in compared),
            "runs": len(errors),
            "worst": max(errors, key=abs, default=None),
        }
    return found


def ranking(judged: Sequence[Judged]) -> dict[str, Any]:
    """Kendall's tau of tokens/s over the runs that came to their end, and the pairs that the profile has in another
    order, with how much faster the first really was.
    """
    whole = [each for each in judged if each.run.complete]
    swapped = []
    for one, other in combinations(whole, 2):
        measured, simulated = (first / second for first, second in zip(_rates(one), _rates(other), strict=True))
        if (measured - 1.0) * (simulated - 1.0) < 0.0:
            swapped.append([one.folder.name, other.folder.name, measured - 1.0])
    tau = as_document(whole)["ranking"] or {}
    return {"runs": len(whole), "cut_and_left_out": len(judged) - len(whole), "tau": tau, "swapped": swapped}


def _rates(judged: Judged) -> tuple[float, float]:
    """Tokens/s, measured and simulated; a run that came to its end has both."""
    rate = judged.chief.figures["tokens_per_s"]
    assert rate.measured is not None
    assert rate.simulated is not None
    return rate.measured, rate.simulated


def repeatability(pairs: Mapping[str, tuple[RecordedRun, RecordedRun]]) -> dict[str, dict[str, Any]]:
    """Of runs that were made twice: by what share the makespan changed, and whether the decisions are the same."""
    found = {}
    for name, (first, again) in pairs.items():
        spans = [float(each.column("end_s")[-1]) for each in (first, again)]
        same = first.manifest["digest"] == again.manifest["digest"]
        found[name] = {"makespan_change": spans[1] / spans[0] - 1.0, "same_decisions": same}
    return found


def written(document: Mapping[str, Any]) -> str:
    """The document as JSON text: a run a line."""
    parts = []
    for name, value in document.items():
        if name in ROWS:
            lines = ",\n".join(f"  {json.dumps(rounded(row))}" for row in value)
            parts.append(f' "{name}": [\n{lines}\n ]' if value else f' "{name}": []')
        else:
            parts.append(f' "{name}": {json.dumps(value if name == "profile" else rounded(value))}')
    return "{\n" + ",\n".join(parts) + "\n}\n"
