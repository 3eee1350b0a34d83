"""What a gate may ask of a run: each metric with its unit, and where it stands among a run's figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Measured = Mapping[str, float | str | None]  # metric -> what was seen; None: there was nothing to measure
MARKS = ("mean", "p50", "p90", "p99")
OK = "ok"


class Unit(StrEnum):
    """What a metric is counted in."""

    SECONDS = "s"
    PER_SECOND = "/s"
    SHARE = "%"
    NUMBER = ""
    WORDS = "words"  # "ok", or what is wrong


# unit -> spelling -> factor to what measurements are in (seconds, per second, a share of 1, a number)
SPELLINGS: Mapping[Unit, Mapping[str, float]] = {
    Unit.SECONDS: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    Unit.PER_SECOND: {"/s": 1.0, "": 1.0},
    Unit.SHARE: {"%": 1e-2, "": 1.0},
    Unit.NUMBER: {"": 1.0},
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that a gate may ask for."""

    unit: Unit
    about: str
    key: str = ""  # of the figures of a run (docs/METRICS.md); empty: not among them
    mark: str = ""  # of a distribution
    per: str = ""  # another figure that it is divided by


def _times() -> dict[str, Metric]:
    named = {
        "ttft": ("ttft_s", "arrival to first token"),
        "tpot": ("tpot_s", "time per output token"),
        "e2e": ("e2e_s", "arrival to end"),
    }
    return {
        f"{mark}_{name}": Metric(Unit.SECONDS, f"{about}, {mark}", key, mark)
        for name, (key, about) in named.items()
        for mark in MARKS
    }


ENDED = ("requests_finished", "requests_refused", "requests_aborted", "requests_failed")
METRICS: Mapping[str, Metric] = {
    "tokens_per_s": Metric(Unit.PER_SECOND, "output tokens a second", "tokens_per_s"),
    "requests_per_s": Metric(Unit.PER_SECOND, "finished requests a second", "requests_per_s"),
    **_times(),
    "makespan": Metric(Unit.SECONDS, "first arrival to last step", "makespan_s"),
    "seconds_to_90pct": Metric(Unit.SECONDS, "until 90 % of the tokens were out", "seconds_to_90pct"),
    "finished": Metric(Unit.NUMBER, "requests that finished", "requests_finished"),
    "refused": Metric(Unit.NUMBER, "requests refused at the door", "requests_refused"),
    "aborted": Metric(Unit.NUMBER, "requests aborted", "requests_aborted"),
    "failed": Metric(Unit.NUMBER, "requests that failed", "requests_failed"),
    "preemptions_per_request": Metric(Unit.NUMBER, "times a request gave way, mean", "preemptions", per="requests"),
    "compressions_per_request": Metric(Unit.NUMBER, "compressions a request, mean", "compressions", per="requests"),
    "slot_wait_per_request": Metric(Unit.SECONDS, "wait for a query slot, mean", "slot_wait_s", per="requests"),
    "recomputed_share": Metric(
        Unit.SHARE, "of prefilled tokens, those computed again", "recomputed_tokens", per="prefill_tokens"
    ),
    "compression_share": Metric(Unit.SHARE, "of the time, compressions alone on the card", "compression_share"),
    "mean_occupancy": Metric(Unit.SHARE, "blocks in use, time mean", "occupancy_mean"),
    "max_occupancy": Metric(Unit.SHARE, "blocks in use, most", "occupancy_max"),
    "mean_running": Metric(Unit.NUMBER, "running requests, time mean", "running_mean"),
    "laws": Metric(Unit.WORDS, "ok, or the first law of the scheduler that was broken"),
    "engine": Metric(Unit.WORDS, "ok, or how the engine decided otherwise or failed a request"),
}


def measures_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Every metric that a run's figures (`traces.metrics.summarize`) hold, in the units of `SPELLINGS`.

    A mean over requests counts every request that ended, and is None where none did.
    """
    counts: dict[str, float] = {"requests": sum(summary[name] for name in ENDED)}
    found: dict[str, float | None] = {}
    for name, metric in METRICS.items():
        if not metric.key:
            continue
        value = summary[metric.key][metric.mark] if metric.mark else summary[metric.key]
        if metric.per:
            under = counts.get(metric.per, summary.get(metric.per, 0))
            value = value / under if under else (0.0 if not value and metric.per != "requests" else None)
        found[name] = None if value is None else float(value)
    return found
