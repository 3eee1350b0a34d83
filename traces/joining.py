"""Several workloads made into one: one after the other, or laid over each other."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from traces.arrivals import on_ticks
from traces.builder import TableBuilder
from traces.reshape import arrival_times, known_fields
from traces.table import RequestTable
from traces.workload import TraceError, Workload, WorkloadMeta


def splice(*workloads: Workload, gap_s: float = 0.0, same_blocks: bool = False) -> Workload:
    """The workloads one after the other, each beginning `gap_s` after the last arrival of the one before.

    Ids that occur in more than one part are marked with the part's number (`0/17`). Block ids of different parts are
    kept apart, unless `same_blocks` says that they name the same blocks (parts cut from one trace).
    """
    if not 0 <= gap_s < float("inf"):
        raise TraceError(f"gap_s is {gap_s!r}, must be a finite number >= 0")
    starts = [0.0]
    for workload in workloads[:-1]:
        starts.append(starts[-1] + float(arrival_times(workload)[-1]) + gap_s)
    what = f"spliced with gaps of {gap_s:g} s"
    return Workload(_joined(workloads, starts, same_blocks), _joined_meta(workloads, what))


def merge(*workloads: Workload, same_blocks: bool = False) -> Workload:
    """The workloads laid over each other, all beginning at once; ids and block ids as in `splice`."""
    table = _joined(workloads, [0.0] * len(workloads), same_blocks)
    order = np.argsort(np.asarray(table.cells("arrival_s", 0, len(table))), kind="stable")
    return Workload(table.take(order.tolist()), _joined_meta(workloads, "merged"))


def _joined(workloads: Sequence[Workload], starts: Sequence[float], same_blocks: bool) -> RequestTable:
    if len(workloads) < 2:
        raise TraceError(f"{len(workloads)} workload given, must be at least two to join")
    blocked = {(w.meta.block_size, w.meta.last_block) for w in workloads if w.meta.block_size is not None}
    if len(blocked) > 1:
        sizes = ", ".join(f"{w.meta.name}: {w.meta.block_size} ({w.meta.last_block})" for w in workloads)
        raise TraceError(f"workloads have different block sizes or last blocks: {sizes}")
    counts = Counter(request.id for workload in workloads for request in workload)
    clash = max(counts.values()) > 1
    builder = TableBuilder()
    next_block = 0
    for number, (workload, start_s) in enumerate(zip(workloads, starts, strict=True)):
        times = on_ticks(arrival_times(workload) + start_s).tolist()
        highest = -1
        for request, time in zip(workload, times, strict=True):
            row = known_fields(request)
            row["arrival_s"] = time
            if clash:
                row |= {name: f"{number}/{row[name]}" for name in ("id", "session", "parent") if name in row}
            if request.prefix_ids and not same_blocks:
                highest = max(highest, *request.prefix_ids)
                row["prefix_ids"] = tuple(block + next_block for block in request.prefix_ids)
            builder.append(row)
        next_block += highest + 1
    return builder.build()


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(value for value in values if value))


def _joined_meta(workloads: Sequence[Workload], what: str) -> WorkloadMeta:
    metas = [workload.meta for workload in workloads]
    dropped: Counter[str] = Counter()
    for meta in metas:
        dropped.update(meta.dropped)
    rows_kept = sum(len(workload) for workload in workloads)
    blocked = next((meta for meta in metas if meta.block_size is not None), metas[0])
    resolutions = [meta.arrival_resolution_s for meta in metas if meta.arrival_resolution_s is not None]
    parts = " + ".join(f"{meta.name} ({meta.sha256[:12] or 'synthetic'})" for meta in metas)
    earlier = [f"{meta.name}: {change}" for meta in metas for change in meta.modifications]
    known: dict[str, Any] = {
        "name": "+".join(meta.name for meta in metas),
        "source": _distinct(meta.source for meta in metas),
        "licence": _distinct(meta.licence for meta in metas),
        "sha256": "",
        "rows_read": rows_kept + sum(dropped.values()),
        "rows_kept": rows_kept,
        "dropped": dict(sorted(dropped.items())),
        "arrival_resolution_s": max(resolutions, default=None),
        "modifications": (*earlier, f"{what}: {parts}"),
    }
    return replace(blocked, **known)
