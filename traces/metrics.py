"""What a run amounts to: pure functions of its tables. Every figure is explained in docs/METRICS.md."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

FloatArray = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)
SHARE_OUT = 0.9  # "90 %" in seconds_to_90pct and steps_to_90pct


def distribution(values: FloatArray) -> Mapping[str, float | None]:
    """Mean and percentiles (linear between ranks); None without values."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)), None)
    marks = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean())} | {f"p{p}": float(mark) for p, mark in zip(PERCENTILES, marks, strict=True)}


def column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """A numeric column as an array (nulls of an integer column are not expected)."""
    values: npt.NDArray[Any] = table[name].to_numpy()
    return values


def time_to_first_token(requests: pa.Table) -> FloatArray:
    """Seconds from arrival to the first token, NaN where there was none."""
    return np.asarray(column(requests, "first_token_s") - column(requests, "arrival_s"), dtype=np.float64)


def time_per_output_token(requests: pa.Table) -> FloatArray:
    """Seconds from the first to the last token over the gaps between, NaN below two tokens or without a regular end."""
    gaps = column(requests, "output_tokens") - 1.0
    spans = column(requests, "finish_s") - column(requests, "first_token_s")
    ended = np.array([status == "finished" for status in requests["status"].to_pylist()], dtype=bool)
    return np.where(ended & (gaps > 0), spans / np.maximum(gaps, 1.0), np.nan)


def end_to_end(requests: pa.Table) -> FloatArray:
    """Seconds from arrival to the end, NaN for requests that did not finish."""
    ended = np.array([status == "finished" for status in requests["status"].to_pylist()], dtype=bool)
    return np.where(ended, column(requests, "finish_s") - column(requests, "arrival_s"), np.nan)


def summarize(requests: pa.Table, steps: pa.Table, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run under their contract names.

    `manifest` gives what tables do not hold: `num_blocks`, `block_size`, `compression_work_s`, `swapped_tokens`.
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
        **_share_out(steps),
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


def _makespan(requests: pa.Table, steps: pa.Table) -> float:
    """Seconds from the first arrival to the end of the last step."""
    if not steps.num_rows or not requests.num_rows:
        return 0.0
    return float(column(steps, "end_s").max() - column(requests, "arrival_s").min())


def _share_out(steps: pa.Table) -> dict[str, Any]:
    """When 90 % of all output tokens of the run were out: seconds from the first step's start, and steps."""
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
    """Token positions in owned blocks that hold no token, in each step."""
    used = num_blocks - column(steps, "free_blocks").astype(np.int64)
    wasted: npt.NDArray[np.int64] = used * block_size - column(steps, "stored_tokens")
    return wasted


def _over_time(steps: pa.Table, makespan: float, num_blocks: int, block_size: int) -> dict[str, float]:
    """Time means over the whole makespan (nothing runs between steps), and maxima."""
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
        figures[f"{name}_mean"] = float((values * seconds).sum() * unit / makespan) if makespan > 0 else 0.0
        figures[f"{name}_max"] = float(values.max() * unit) if len(values) else 0.0
    figures["running_max"] = int(figures["running_max"])
    return figures
