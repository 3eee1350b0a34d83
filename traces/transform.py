"""Functions that make a workload from another one: change rates or lengths, select, spread, add
tokens, join.

Each change is noted in `meta.modifications`. No function changes what two prompts share, except
where its docstring says so. Rows that are left out are counted in `meta.dropped`, so that rows read
= kept + dropped still holds; times then count from the first row that is left. `splice` puts
workloads one after the other, and `merge` overlays them.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zlab.traces.block_ids import TokensFromBlocks
from zlab.traces.choices import unknown_choice
from zlab.traces.formats.layout import MAX_LENGTH_TOKENS
from zlab.traces.synthetic import (
    END_TOKEN_ID,
    FIRST_TOKEN_ID,
    at_least,
    generator,
    on_ticks,
    positive,
)
from zlab.traces.workload import (
    INT_MISSING,
    FieldValues,
    OptionalInts,
    RequestTable,
    TableBuilder,
    TraceError,
    TraceRequest,
    Workload,
    WorkloadMeta,
    plain_array,
)

Seconds = npt.NDArray[np.float64]


def as_table(workload: Workload) -> RequestTable:
    """Return the workload's requests by column, in the workload's order with row i in place i."""
    requests = workload.requests
    if isinstance(requests, RequestTable):
        return requests.in_place()
    builder = TableBuilder()
    for request in requests:
        builder.append(known_fields(request))
    return builder.build()


def known_fields(request: TraceRequest) -> dict[str, Any]:
    """Return the request's fields that have a value, by name."""
    values = ((f.name, getattr(request, f.name)) for f in fields(TraceRequest))
    return {name: value for name, value in values if value is not None}


def arrival_times(workload: Workload) -> Seconds:
    """Return the arrival time of each request in seconds, ascending. Raise `TraceError` for an
    offline batch, which has none.
    """
    cells = as_table(workload).cells("arrival_s", 0, len(workload))
    if None in cells:
        raise TraceError(
            f"workload {workload.meta.name!r} is an offline batch: its requests have no "
            f"arrival times"
        )
    times = np.asarray(cells, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        raise TraceError(f"workload {workload.meta.name!r} is not in order of arrival")
    return times


def _changed(meta: WorkloadMeta, what: str) -> WorkloadMeta:
    return replace(meta, modifications=(*meta.modifications, what))


def _with_columns(workload: Workload, what: str, columns: dict[str, FieldValues]) -> Workload:
    table = as_table(workload)
    return Workload(
        replace(table, columns={**table.columns, **columns}), _changed(workload.meta, what)
    )


def faster(workload: Workload, factor: float) -> Workload:
    """Make arrivals `factor` times as fast (below 1: slower). Lengths and think times do not
    change.
    """
    positive("factor", factor)
    times = on_ticks(arrival_times(workload) / factor)
    return _with_columns(workload, f"arrivals x {factor:g}", {"arrival_s": plain_array(times)})


def longer(workload: Workload, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """Multiply lengths and round them to whole tokens. `max_tokens` and `reasoning_tokens` follow
    the output.

    Prompts or outputs with given blocks or tokens cannot be made longer, because the new tokens
    would be unknown.

    Args:
        workload: The requests.
        prompt: Factor of the prompt lengths.
        output: Factor of the output lengths.
    """
    columns: dict[str, FieldValues] = {}
    table = as_table(workload)
    for kind, factor, blockers in (
        ("prompt", prompt, ("prefix_ids", "prompt_ids")),
        ("output", output, ("output_ids",)),
    ):
        positive(f"{kind} factor", factor)
        if factor == 1:
            continue
        for name in blockers:
            if name in table.columns:
                raise TraceError(f"{kind} lengths cannot be multiplied: requests have {name}")
        names = (
            ("prompt_tokens",)
            if kind == "prompt"
            else ("output_tokens", "max_tokens", "reasoning_tokens")
        )
        columns |= {name: _scaled(table, name, factor) for name in names if name in table.columns}
    if not columns:
        raise TraceError("lengths multiplied by 1: give a prompt or an output factor")
    return _with_columns(workload, f"lengths x {prompt:g} prompt, x {output:g} output", columns)


def _scaled(table: RequestTable, name: str, factor: float) -> FieldValues:
    lowest = 0 if name == "reasoning_tokens" else 1
    cells = table.cells(name, 0, len(table))
    scaled = [INT_MISSING if cell is None else max(lowest, round(cell * factor)) for cell in cells]
    longest = max(scaled)
    if longest > MAX_LENGTH_TOKENS:
        raise TraceError(f"{name} would reach {longest}, must be at most {MAX_LENGTH_TOKENS}")
    return OptionalInts(array("q", scaled))


def _kept(workload: Workload, keep: Sequence[bool], what: str, reason: str) -> Workload:
    """Return the rows to keep, with times from the first of them. The others are counted under
    `reason`.
    """
    positions = [index for index, kept in enumerate(keep) if kept]
    if not positions:
        raise TraceError(f"{what} leaves none of {len(workload)} requests")
    table = as_table(workload).take(positions).in_place()
    if "arrival_s" in table.columns:
        times = np.asarray(table.cells("arrival_s", 0, len(table)))
        table = replace(
            table, columns={**table.columns, "arrival_s": plain_array(on_ticks(times - times[0]))}
        )
    meta, num_lost = workload.meta, len(workload) - len(positions)
    dropped = dict(meta.dropped)
    if num_lost:
        dropped[reason] = dropped.get(reason, 0) + num_lost
    rows_read = len(positions) + sum(dropped.values())
    meta = replace(
        meta, rows_kept=len(positions), rows_read=rows_read, dropped=dict(sorted(dropped.items()))
    )
    return Workload(table, _changed(meta, what))


def thin(workload: Workload, keep: float, seed: int = 0) -> Workload:
    """Keep each request with probability `keep`, independently. A Poisson process stays one, at a
    lower rate.

    Args:
        workload: The requests.
        keep: Probability in (0, 1].
        seed: Seed of the random numbers.
    """
    if not 0 < keep <= 1:
        raise TraceError(f"keep is {keep!r}, must be above 0 and at most 1")
    drawn = generator(seed).random(len(workload)) < keep
    return _kept(workload, drawn.tolist(), f"thinned to {keep:g}, seed {seed}", "thinned out")


def cut(
    workload: Workload,
    start_s: float | None = None,
    end_s: float | None = None,
    first: int | None = None,
    classes: Iterable[str] | None = None,
    where: Callable[[TraceRequest], bool] | None = None,
) -> Workload:
    """Keep the requests that satisfy all given conditions.

    Args:
        workload: The requests.
        start_s: Earliest arrival in seconds.
        end_s: Arrivals are before this time in seconds.
        first: Largest number of requests, the earliest first.
        classes: Request classes to keep. A class that does not occur raises TraceError, which names
            those that do.
        where: Further condition on a request.
    """
    keep = np.ones(len(workload), dtype=np.bool_)
    said = []
    if start_s is not None or end_s is not None:
        low, high = 0.0 if start_s is None else start_s, float("inf") if end_s is None else end_s
        if not 0 <= low < high:
            raise TraceError(f"time window {low:g}..{high:g} s is empty or begins before 0")
        times = arrival_times(workload)
        keep &= (times >= low) & (times < high)
        said.append(f"{low:g} s <= arrival < {high:g} s")
    if classes is not None:
        wanted = sorted(set(classes))
        found = as_table(workload).cells("cls", 0, len(workload))
        missing = sorted(set(wanted) - {name for name in found if name is not None})
        if missing or not wanted:
            present = ", ".join(sorted({name for name in found if name is not None})) or "none"
            raise TraceError(
                f"no request of class {', '.join(map(repr, missing))}; classes are {present}"
            )
        keep &= np.fromiter((name in wanted for name in found), np.bool_, len(workload))
        said.append(f"class {', '.join(wanted)}")
    if where is not None:
        keep &= np.fromiter(map(where, workload), np.bool_, len(workload))
        said.append("a predicate")
    if first is not None:
        at_least("first", first)
        keep &= np.cumsum(keep) <= first
        said.append(f"first {first}")
    if not said:
        raise TraceError(
            "nothing to cut by: give a time window, classes, a predicate or a number of requests"
        )
    return _kept(workload, keep.tolist(), f"cut to {' and '.join(said)}", "cut away")


def spread(
    workload: Workload,
    how: Literal["even", "uniform"] = "even",
    seed: int = 0,
    within_s: float | None = None,
) -> Workload:
    """Spread requests with equal times over the time up to the next batch.

    The order does not change. The resolution in the metadata does not change either, because the
    new times are not measured.

    Args:
        workload: The requests.
        how: `even` uses equal distances, `uniform` random times.
        seed: Seed of the random times.
        within_s: Longest time to spread over, in seconds; by default the trace's own resolution.
    """
    if how not in {"even", "uniform"}:
        raise TraceError(unknown_choice("way to spread", how, ("even", "uniform")))
    within_s = workload.meta.arrival_resolution_s if within_s is None else within_s
    if within_s is None:
        raise TraceError(
            f"workload {workload.meta.name!r} has no arrival resolution: say over how long "
            f"to spread"
        )
    positive("within_s", within_s)
    times = arrival_times(workload)
    batch_times, batch, sizes = np.unique(times, return_inverse=True, return_counts=True)
    room = np.minimum(np.diff(batch_times, append=np.inf), within_s)
    place = np.arange(len(times)) - (np.cumsum(sizes) - sizes)[batch]
    share = place / sizes[batch]
    if how == "uniform":
        share = generator(seed).random(len(times))
        share = share[np.lexsort((share, batch))]
        share[place == 0] = 0.0  # the first request of a batch keeps its time
    moved = on_ticks(times + share * room[batch])
    num_moved = int(np.count_nonzero(moved != times))
    said = (
        f"{num_moved} arrivals spread "
        f"{'evenly' if how == 'even' else f'uniformly (seed {seed})'} over {within_s:g} s"
    )
    return _with_columns(workload, said, {"arrival_s": plain_array(moved)})


def with_token_ids(
    workload: Workload,
    seed: int = 0,
    first_token_id: int = FIRST_TOKEN_ID,
    end_token_id: int = END_TOKEN_ID,
) -> Workload:
    """Add token ids to prompts, made from their block ids (see `zlab.traces.block_ids`). The
    prompts share exactly what the ids say.

    Requests without block ids stay without tokens. An engine that shares whole blocks shares the
    same prefixes if its block size divides the trace's.

    Args:
        workload: The requests.
        seed: Seed of the tokens.
        first_token_id: Lowest token id.
        end_token_id: Token ids are below this.
    """
    if not 0 <= first_token_id < end_token_id:
        raise TraceError(f"token ids {first_token_id}..{end_token_id} are an empty range")
    if type(seed) is not int or not 0 <= seed < 2**62:
        raise TraceError(f"seed is {seed!r}, must be a whole number 0..2**62-1")
    table, block_size = as_table(workload), workload.meta.block_size
    if "prefix_ids" not in table.columns or block_size is None:
        raise TraceError(f"workload {workload.meta.name!r} has no block ids to make tokens from")
    columns = table.columns
    tokens = TokensFromBlocks(
        columns["prefix_ids"],
        columns["prompt_tokens"],
        columns["id"],
        block_size,
        seed,
        first_token_id,
        end_token_id,
    )
    return _with_columns(
        workload, f"token ids made from block ids, seed {seed}", {"prompt_ids": tokens}
    )


def splice(*workloads: Workload, gap_s: float = 0.0, same_blocks: bool = False) -> Workload:
    """Put the workloads one after the other.

    Ids that occur in more than one part are marked with the part's number (`0/17`).

    Args:
        *workloads: The parts, at least two.
        gap_s: Seconds between the last arrival of a part and the first of the next.
        same_blocks: Whether equal block ids in different parts name equal blocks, as in parts of
            one trace. Otherwise the ids of the parts are kept apart.
    """
    if not 0 <= gap_s < float("inf"):
        raise TraceError(f"gap_s is {gap_s!r}, must be a finite number >= 0")
    starts = [0.0]
    for workload in workloads[:-1]:
        starts.append(starts[-1] + float(arrival_times(workload)[-1]) + gap_s)
    what = f"spliced with gaps of {gap_s:g} s"
    return Workload(_joined(workloads, starts, same_blocks), _joined_meta(workloads, what))


def merge(*workloads: Workload, same_blocks: bool = False) -> Workload:
    """Overlay the workloads so that all begin at once. Ids and block ids are treated as in
    `splice`.
    """
    table = _joined(workloads, [0.0] * len(workloads), same_blocks)
    order = np.argsort(np.asarray(table.cells("arrival_s", 0, len(table))), kind="stable")
    return Workload(table.take(order.tolist()), _joined_meta(workloads, "merged"))


def _joined(
    workloads: Sequence[Workload], starts: Sequence[float], same_blocks: bool
) -> RequestTable:
    if len(workloads) < 2:
        raise TraceError(f"{len(workloads)} workload given, must be at least two to join")
    blocked = {
        (w.meta.block_size, w.meta.last_block) for w in workloads if w.meta.block_size is not None
    }
    if len(blocked) > 1:
        sizes = ", ".join(
            f"{w.meta.name}: {w.meta.block_size} ({w.meta.last_block})" for w in workloads
        )
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
                row |= {
                    name: f"{number}/{row[name]}"
                    for name in ("id", "session", "parent")
                    if name in row
                }
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
    resolutions = [
        meta.arrival_resolution_s for meta in metas if meta.arrival_resolution_s is not None
    ]
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
