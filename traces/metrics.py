"""Metrics of a run and of time windows of it, as pure functions of its tables.

docs/METRICS.md explains every metric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

FloatArray = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)
SHARE_OUT = 0.9  # the "90 %" in seconds_to_90pct and steps_to_90pct


def distribution(values: FloatArray) -> Mapping[str, float | None]:
    """Return mean and percentiles (linear between ranks) without NaN; None for each without
    values.
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)), None)
    marks = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean())} | {
        f"p{p}": float(mark) for p, mark in zip(PERCENTILES, marks, strict=True)
    }


def column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a numeric column as an array. An integer column must not have nulls."""
    values: npt.NDArray[Any] = table[name].to_numpy()
    return values


def time_to_first_token(requests: pa.Table) -> FloatArray:
    """Return the seconds from arrival to the first token, NaN without a first token. Shape
    [requests].
    """
    return np.asarray(
        column(requests, "first_token_s") - column(requests, "arrival_s"), dtype=np.float64
    )


def time_per_output_token(requests: pa.Table) -> FloatArray:
    """Return the seconds from the first to the last token / (output tokens - 1). Shape [requests].
    NaN below two tokens and for requests that did not finish.
    """
    gaps = column(requests, "output_tokens") - 1.0
    spans = column(requests, "finish_s") - column(requests, "first_token_s")
    ended = np.array(
        [status == "finished" for status in requests["status"].to_pylist()], dtype=bool
    )
    return np.where(ended & (gaps > 0), spans / np.maximum(gaps, 1.0), np.nan)


def end_to_end(requests: pa.Table) -> FloatArray:
    """Return the seconds from arrival to the end, NaN for requests that did not finish. Shape
    [requests].
    """
    ended = np.array(
        [status == "finished" for status in requests["status"].to_pylist()], dtype=bool
    )
    return np.where(ended, column(requests, "finish_s") - column(requests, "arrival_s"), np.nan)


def summarize(requests: pa.Table, steps: pa.Table, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a run under their contract names.

    Args:
        requests: The requests table.
        steps: The steps table.
        manifest: Values that the tables lack: `num_blocks`, `block_size`, `compression_work_s`,
            `swapped_tokens`, and under `lengths` the share of solved problems, where it is known.
    """
    status = requests["status"].to_pylist()
    output = int(column(requests, "output_tokens").sum())
    makespan = _makespan(requests, steps)
    per_second = 1.0 / makespan if makespan > 0 else 0.0
    finished = status.count("finished")
    return {
        "requests_finished": finished,
        "requests_refused": status.count("refused"),
        "requests_aborted": status.count("aborted"),
        "requests_failed": status.count("failed"),
        "output_tokens": output,
        "makespan_s": makespan,
        "tokens_per_s": output * per_second,
        "requests_per_s": finished * per_second,
        "solved_per_s": _solved(manifest, finished * per_second),
        **_when_90pct(steps),
        **_step_counts(steps),
        "prefill_tokens": int(column(steps, "prefill_tokens").sum()),
        "recomputed_tokens": int(column(requests, "recomputed_tokens").sum()),
        "prefix_hit_tokens": int(column(requests, "prefix_hit_tokens").sum()),
        "preemptions": int(column(requests, "preemptions").sum()),
        "swaps": int(column(requests, "swaps").sum()),
        "swapped_tokens": int(manifest["swapped_tokens"]),
        "compressions": int(column(requests, "compressions").sum()),
        "compression_share": float(manifest["compression_work_s"]) * per_second,
        "slot_wait_s": float(column(requests, "slot_wait_s").sum()),
        **_over_time(steps, makespan, int(manifest["num_blocks"]), int(manifest["block_size"])),
        "ttft_s": distribution(time_to_first_token(requests)),
        "tpot_s": distribution(time_per_output_token(requests)),
        "e2e_s": distribution(end_to_end(requests)),
    }


def _solved(manifest: Mapping[str, Any], requests_per_s: float) -> float | None:
    """Return solved problems per second: finished requests per second times the policy's measured
    pass@1.
    """
    accuracy = (manifest.get("lengths") or {}).get("pass_at_1")
    return None if accuracy is None else float(accuracy) * requests_per_s


def _makespan(requests: pa.Table, steps: pa.Table) -> float:
    """Return the seconds from the first arrival to the end of the last step."""
    if not steps.num_rows or not requests.num_rows:
        return 0.0
    return float(column(steps, "end_s").max() - column(requests, "arrival_s").min())


def _when_90pct(steps: pa.Table) -> dict[str, Any]:
    """Return when 90 % of the run's output tokens were produced: seconds from the start of the
    first step, and steps.
    """
    tokens = np.cumsum(column(steps, "output_tokens"), dtype=np.int64)
    if not len(tokens) or not tokens[-1]:
        return {"seconds_to_90pct": None, "steps_to_90pct": None}
    index = int(np.searchsorted(tokens, SHARE_OUT * tokens[-1]))
    seconds = float(column(steps, "end_s")[index] - column(steps, "start_s")[0])
    return {"seconds_to_90pct": seconds, "steps_to_90pct": index + 1}


def _step_counts(steps: pa.Table) -> dict[str, int]:
    return {
        "steps": steps.num_rows,
        "prefill_steps": int((column(steps, "prefill_tokens") > 0).sum()),
        "decode_steps": int((column(steps, "decodes") > 0).sum()),
    }


def wasted_slots(steps: pa.Table, num_blocks: int, block_size: int) -> npt.NDArray[np.int64]:
    """Return the token positions of owned blocks that hold no token, for each step.

    Args:
        steps: The steps table.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
    """
    used = num_blocks - column(steps, "free_blocks").astype(np.int64)
    wasted: npt.NDArray[np.int64] = used * block_size - column(steps, "stored_tokens")
    return wasted


def _over_time(
    steps: pa.Table, makespan: float, num_blocks: int, block_size: int
) -> dict[str, float]:
    """Return time means over the whole makespan (values are 0 between steps), and maxima."""
    seconds = column(steps, "end_s") - column(steps, "start_s")
    used = num_blocks - column(steps, "free_blocks").astype(np.int64)
    running = column(steps, "running")
    wasted = wasted_slots(steps, num_blocks, block_size)
    figures: dict[str, float] = {}
    for name, values, unit in (
        ("running", running, 1.0),
        ("occupancy", used, 1.0 / num_blocks),
        ("wasted_slots", wasted, 1.0 / (num_blocks * block_size)),
    ):
        figures[f"{name}_mean"] = (
            float((values * seconds).sum() * unit / makespan) if makespan > 0 else 0.0
        )
        figures[f"{name}_max"] = float(values.max() * unit) if len(values) else 0.0
    figures["running_max"] = int(figures["running_max"])
    return figures


BoolArray = npt.NDArray[np.bool_]
MARKS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
FIGURES: tuple[str, ...] = (
    "tokens_per_s",
    "running_mean",
    *(f"{name} {mark}" for name in LATENCIES for mark in MARKS),
    "preemptions_per_request",
    "compressions_per_request",
    "prefix_hit_share",
)


@dataclass(frozen=True)
class Observed:
    """A run by request number and by step, as arrays. Times are in seconds, NaN where the event did
    not happen.
    """

    arrival_s: FloatArray
    first_s: FloatArray
    finish_s: FloatArray  # NaN for requests that did not finish
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    hit_tokens: FloatArray
    preemptions: FloatArray
    compressions: FloatArray
    step_start_s: FloatArray
    step_end_s: FloatArray
    step_output_tokens: FloatArray
    step_running: FloatArray

    @property
    def span(self) -> tuple[float, float]:
        """The first arrival and the end of the last step, in seconds."""
        start = float(self.arrival_s.min()) if len(self.arrival_s) else 0.0
        return start, float(self.step_end_s.max()) if len(self.step_end_s) else start


def figures(
    run: Observed, window: tuple[float, float], counted: BoolArray
) -> Mapping[str, float | None]:
    """Return the `FIGURES` of a time window.

    Rates and running requests are those of the window; the other metrics are those of the requests
    that arrived in it. None means that there is no value.

    Args:
        run: The run.
        window: Start and end in seconds.
        counted: Which requests count for latencies, by number (for two runs: those that finished in
            both).
    """
    start, end = window
    length = end - start
    inside = (run.step_end_s > start) & (run.step_end_s <= end)
    seconds = np.clip(
        np.minimum(run.step_end_s, end) - np.maximum(run.step_start_s, start), 0.0, None
    )
    arrived = (run.arrival_s >= start) & (run.arrival_s < end)
    found: dict[str, float | None] = {
        "tokens_per_s": float(run.step_output_tokens[inside].sum()) / length
        if length > 0
        else None,
        "running_mean": float((run.step_running * seconds).sum()) / length if length > 0 else None,
    }
    for name, values in _latencies(run, arrived & counted).items():
        found |= {f"{name} {mark}": value for mark, value in distribution(values).items()}
    number, prompt = int(arrived.sum()), float(run.prompt_tokens[arrived].sum())
    for name in ("preemptions", "compressions"):
        total = float(getattr(run, name)[arrived].sum())
        found[f"{name}_per_request"] = total / number if number else None
    # A request that is admitted again finds its own blocks, too: at most all of its prompt counts.
    hits = float(np.minimum(run.hit_tokens, run.prompt_tokens)[arrived].sum())
    found["prefix_hit_share"] = hits / prompt if prompt else None
    return found


def _latencies(run: Observed, which: BoolArray) -> dict[str, FloatArray]:
    gaps = run.output_tokens[which] - 1.0
    spans = run.finish_s[which] - run.first_s[which]
    return {
        "ttft_s": run.first_s[which] - run.arrival_s[which],
        "tpot_s": np.where(gaps > 0, spans / np.maximum(gaps, 1.0), np.nan),
        "e2e_s": run.finish_s[which] - run.arrival_s[which],
    }


def cut(span: tuple[float, float], number: int) -> Sequence[tuple[float, float]]:
    """Return `number` windows of equal length, from the span's start to its end."""
    marks = np.linspace(span[0], span[1], number + 1).tolist()
    return list(pairwise(marks))
