"""Reduce a recorded run of the engine to a few figures, and find the shared data.

Nothing here needs torch, so that a recording can be judged on a machine without it.
"""

from math import floor, log10
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zlab.sim.recorded_run import KINDS, RecordedRun
from zlab.traces.metrics import column, summarize

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
NUM_LONGEST = 3
NUM_MOMENTS = 60
DIGITS = 5
REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_PLACES = (REPOSITORY.parent / "shared", REPOSITORY / ".carry" / "shared")
KEPT = (
    "tokens_per_s",
    "steps",
    "prefill_tokens",
    "recomputed_tokens",
    "preemptions",
    "swaps",
    "swapped_tokens",
    "compressions",
    "running_mean",
    "running_max",
    "occupancy_mean",
    "occupancy_max",
    "requests_finished",
    "requests_refused",
    "ttft_s",
    "tpot_s",
    "e2e_s",
)


def find_shared(kind: str, name: str) -> Path | None:
    """Return a file of `../shared/KIND`, beside the checkout or in `.carry/` inside it, if any."""
    places = [place / kind / name for place in SHARED_PLACES]
    return next((place for place in places if place.is_file()), None)


def shared(kind: str, name: str) -> Path:
    """Return a file as `find_shared`; ends the program, naming both places, without one."""
    found = find_shared(kind, name)
    if found is None:
        raise SystemExit(f"no {' or '.join(str(place / kind / name) for place in SHARED_PLACES)}")
    return found


def plain(policy: str) -> str:
    """Return the policy as part of a run's name: "hybrid:budget.tokens=1024" as "hybrid-1024"."""
    found = policy.replace(":", "-").replace("=", "-")
    return found.replace("budget.tokens-", "").replace("comes_back-", "")


def seconds_to_shares(steps: pa.Table, tokens_asked: int) -> dict[str, float | None]:
    """Return the seconds from the first step's start until each of `SHARES` of the tokens was out.

    A share that the run did not reach is None.
    """
    out = np.cumsum(column(steps, "output_tokens"), dtype=np.int64)
    ends = column(steps, "end_s") - column(steps, "start_s")[:1]
    found: dict[str, float | None] = {}
    for share in SHARES:
        place = int(np.searchsorted(out, share * tokens_asked))
        found[str(share)] = float(ends[place]) if place < len(out) else None
    return found


def over_time(steps: pa.Table, num_blocks: int, count: int = NUM_MOMENTS) -> dict[str, list[float]]:
    """Sample the run at `count` + 1 evenly spaced moments, from its first step to its last.

    Returns lists by name: `seconds` since the first step, `tokens_out` until then, and, of the
    step under way or the last one before, `occupancy` (share of the blocks) and `running`.
    """
    starts, ends = column(steps, "start_s"), column(steps, "end_s")
    moments = np.linspace(float(starts[0]), float(ends[-1]), count + 1)
    out = np.concatenate([[0], np.cumsum(column(steps, "output_tokens"), dtype=np.int64)])
    step = np.maximum(np.searchsorted(starts, moments, side="right") - 1, 0)
    used = num_blocks - column(steps, "free_blocks").astype(np.int64)
    return {
        "seconds": (moments - moments[0]).tolist(),
        "tokens_out": out[np.searchsorted(ends, moments, side="right")].tolist(),
        "occupancy": (used[step] / num_blocks).tolist(),
        "running": column(steps, "running")[step].tolist(),
    }


def steps_by_kind(steps: pa.Table, kinds: npt.NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Return, for each kind of step, its number, its seconds, and the longest steps.

    `kinds` holds a place in `zlab.sim.recorded_run.KINDS` for each step.
    """
    milliseconds = (column(steps, "end_s") - column(steps, "start_s")) * 1e3
    found = {}
    for place, kind in enumerate(KINDS):
        at = np.flatnonzero(kinds == place)
        if not len(at):
            continue
        longest = at[np.argsort(-milliseconds[at], kind="stable")[:NUM_LONGEST]]
        found[kind] = {
            "num_steps": len(at),
            "seconds": float(milliseconds[at].sum() * 1e-3),
            "p50_ms": float(np.median(milliseconds[at])),
            "p99_ms": float(np.percentile(milliseconds[at], 99)),
            "longest": [
                {"step": int(step), "ms": float(milliseconds[step])}
                | {
                    name: int(column(steps, name)[step])
                    for name in ("decodes", "prefill_tokens", "compressions")
                }
                for step in longest
            ],
        }
    return found


def figures_of(folder: Path, tokens_asked: int) -> dict[str, Any]:
    """Return the figures of a recording whose requests asked for so many output tokens.

    Refused requests do not count. Raises RecordingError when the recording is damaged or holds no
    step.
    """
    run = RecordedRun(folder)
    summary = summarize(run.requests, run.steps, run.manifest)
    refused = np.array(
        [status == "refused" for status in run.requests["status"].to_pylist()], dtype=bool
    )
    unasked = np.maximum(column(run.requests, "asked_output_tokens")[refused], 0)
    asked = tokens_asked - int(unasked.sum())
    served_s = float(run.column("end_s")[-1] - run.column("start_s")[0])
    gaps = run.column("start_s")[1:] - run.column("end_s")[:-1]
    return {
        "digest": run.manifest["digest"],
        "tokens_asked": asked,
        "tokens_out": int(run.column("output_tokens").sum()),
        "served_s": served_s,
        "seconds_to_share": seconds_to_shares(run.steps, asked),
        "compression_work_s": run.manifest["compression_work_s"],
        "compression_share": run.manifest["compression_work_s"] / served_s,
        "gap_ms_mean": float(gaps.mean() * 1e3) if len(gaps) else 0.0,
        **{name: summary[name] for name in KEPT},
        "steps_by_kind": steps_by_kind(run.steps, run.kinds),
        "over_time": over_time(run.steps, run.limits.num_blocks),
    }


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Return the same JSON with so many significant digits; measurements have no more."""
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each, digits) for each in value]
    if isinstance(value, float) and np.isfinite(value) and value != 0.0:
        return round(value, digits - 1 - floor(log10(abs(value))))
    return value
