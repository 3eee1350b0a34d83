"""A workload made into another: faster, thinner, longer, cut, spread, joined, with tokens. Each change is noted.

Nothing here touches what two prompts share except where said. Rows left out are counted in `meta.dropped`, so that
rows read = kept + dropped still holds; times count from the first row that is left.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from traces.arrivals import on_ticks, positive
from traces.builder import TableBuilder
from traces.formats.cells import MAX_LENGTH_TOKENS
from traces.recipe import END_TOKEN_ID, FIRST_TOKEN_ID, at_least, generator
from traces.table import Column, OptionalInts, RequestTable, plain_array
from traces.tokens import TokensFromBlocks
from traces.workload import INT_MISSING, TraceError, TraceRequest, Workload, WorkloadMeta

Seconds = npt.NDArray[np.float64]


def as_table(workload: Workload) -> RequestTable:
    """The workload's requests by column, in the workload's order with row i in place i."""
    requests = workload.requests
    if isinstance(requests, RequestTable):
        return requests.in_place()
    builder = TableBuilder()
    for request in requests:
        builder.append(known_fields(request))
    return builder.build()


def known_fields(request: TraceRequest) -> dict[str, Any]:
    """The request's fields that have a value, by name."""
    values = ((f.name, getattr(request, f.name)) for f in fields(TraceRequest))
    return {name: value for name, value in values if value is not None}


def arrival_times(workload: Workload) -> Seconds:
    """Every request's arrival, ascending. Raises `TraceError` for an offline batch, which has none."""
    cells = as_table(workload).cells("arrival_s", 0, len(workload))
    if None in cells:
        raise TraceError(f"workload {workload.meta.name!r} is an offline batch: its requests have no arrival times")
    times = np.asarray(cells, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        raise TraceError(f"workload {workload.meta.name!r} is not in order of arrival")
    return times


def _changed(meta: WorkloadMeta, what: str) -> WorkloadMeta:
    return replace(meta, modifications=(*meta.modifications, what))


def _with_columns(workload: Workload, what: str, columns: dict[str, Column]) -> Workload:
    table = as_table(workload)
    return Workload(replace(table, columns={**table.columns, **columns}), _changed(workload.meta, what))


def faster(workload: Workload, factor: float) -> Workload:
    """Arrivals `factor` times as fast (below 1: slower). Lengths and think times stay."""
    positive("factor", factor)
    times = on_ticks(arrival_times(workload) / factor)
    return _with_columns(workload, f"arrivals x {factor:g}", {"arrival_s": plain_array(times)})


def longer(workload: Workload, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """Lengths multiplied and rounded to whole tokens; `max_tokens` and `reasoning_tokens` follow the output.

    Prompts (outputs) whose blocks or tokens are given cannot be stretched: there is nothing to fill them with.
    """
    columns: dict[str, Column] = {}
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
        names = ("prompt_tokens",) if kind == "prompt" else ("output_tokens", "max_tokens", "reasoning_tokens")
        columns |= {name: _scaled(table, name, factor) for name in names if name in table.columns}
    if not columns:
        raise TraceError("lengths multiplied by 1: give a prompt or an output factor")
    return _with_columns(workload, f"lengths x {prompt:g} prompt, x {output:g} output", columns)


def _scaled(table: RequestTable, name: str, factor: float) -> Column:
    lowest = 0 if name == "reasoning_tokens" else 1
    cells = table.cells(name, 0, len(table))
    scaled = [INT_MISSING if cell is None else max(lowest, round(cell * factor)) for cell in cells]
    longest = max(scaled)
    if longest > MAX_LENGTH_TOKENS:
        raise TraceError(f"{name} would reach {longest}, must be at most {MAX_LENGTH_TOKENS}")
    return OptionalInts(array("q", scaled))


def _kept(workload: Workload, keep: Sequence[bool], what: str, reason: str) -> Workload:
    """The rows to keep, times from the first of them, the others counted under `reason`."""
    positions = [index for index, kept in enumerate(keep) if kept]
    if not positions:
        raise TraceError(f"{what} leaves none of {len(workload)} requests")
    table = as_table(workload).take(positions).in_place()
    if "arrival_s" in table.columns:
        times = np.asarray(table.cells("arrival_s", 0, len(table)))
        table = replace(table, columns={**table.columns, "arrival_s": plain_array(on_ticks(times - times[0]))})
    meta, num_lost = workload.meta, len(workload) - len(positions)
    dropped = dict(meta.dropped)
    if num_lost:
        dropped[reason] = dropped.get(reason, 0) + num_lost
    rows_read = len(positions) + sum(dropped.values())
    meta = replace(meta, rows_kept=len(positions), rows_read=rows_read, dropped=dict(sorted(dropped.items())))
    return Workload(table, _changed(meta, what))


def thin(workload: Workload, keep: float, seed: int = 0) -> Workload:
    """Each request kept with probability `keep`, by its own draw: a Poisson process stays one at a lower rate."""
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
    """The first n requests that arrive in start_s <= t < end_s, are of one of the classes and satisfy `where`.

    A class that does not occur is an error that names those which do.
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
            raise TraceError(f"no request of class {', '.join(map(repr, missing))}; classes are {present}")
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
        raise TraceError("nothing to cut by: give a time window, classes, a predicate or a number of requests")
    return _kept(workload, keep.tolist(), f"cut to {' and '.join(said)}", "cut away")


def spread(
    workload: Workload, how: Literal["even", "uniform"] = "even", seed: int = 0, within_s: float | None = None
) -> Workload:
    """Requests of equal time spread over the time to the next batch, at most `within_s` (the trace's own resolution).

    `even` keeps equal distances, `uniform` draws the times; the order stays. The resolution in the metadata stays what
    it was: spreading adds no knowledge.
    """
    if how not in {"even", "uniform"}:
        raise TraceError(f"unknown way to spread {how!r}; known are even, uniform")
    within_s = workload.meta.arrival_resolution_s if within_s is None else within_s
    if within_s is None:
        raise TraceError(f"workload {workload.meta.name!r} has no arrival resolution: say over how long to spread")
    positive("within_s", within_s)
    times = arrival_times(workload)
    batch_times, batch, sizes = np.unique(times, return_inverse=True, return_counts=True)
    room = np.minimum(np.diff(batch_times, append=np.inf), within_s)
    place = np.arange(len(times)) - (np.cumsum(sizes) - sizes)[batch]
    share = place / sizes[batch]
    if how == "uniform":
        share = generator(seed).random(len(times))
        share = share[np.lexsort((share, batch))]
        share[place == 0] = 0.0  # the batch's own time stays its first request's
    moved = on_ticks(times + share * room[batch])
    num_moved = int(np.count_nonzero(moved != times))
    said = (
        f"{num_moved} arrivals spread {'evenly' if how == 'even' else f'uniformly (seed {seed})'} over {within_s:g} s"
    )
    return _with_columns(workload, said, {"arrival_s": plain_array(moved)})


def with_token_ids(
    workload: Workload, seed: int = 0, first_token_id: int = FIRST_TOKEN_ID, end_token_id: int = END_TOKEN_ID
) -> Workload:
    """Prompts with token ids made from their block ids (see `traces.tokens`): prompts share exactly what the ids say.

    Requests without block ids stay without tokens. An engine that shares whole blocks shares the same prefixes when its
    block size divides the trace's.
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
        columns["prefix_ids"], columns["prompt_tokens"], columns["id"], block_size, seed, first_token_id, end_token_id
    )
    return _with_columns(workload, f"token ids made from block ids, seed {seed}", {"prompt_ids": tokens})
