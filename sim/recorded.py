"""An engine's recording as the simulator sees it: checked, with what every step did and how long it really took."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from policies.changes import read_changes
from policies.core.events import ROW, Kind
from policies.core.limits import Limits
from policies.core.policy import Join, Policy
from policies.spec import policy_from_toml
from sim.changing import Change
from sim.cost import CostModel
from sim.errors import SimError
from sim.step_times import FloatArray, host_free_before, run_seconds, step_seconds
from traces.asked import read_asked
from traces.recording import Recording, RecordingError
from traces.workload import TraceRequest, Workload, WorkloadMeta

IntArray = npt.NDArray[np.int64]
PRICED = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
KINDS = ("decode only", "prefill only", "mixed", "with compression", "other")
STOPPED = "stop"


@dataclass(frozen=True)
class Moments:
    """Of every request its arrival, and the ends of the steps that brought its first token and its end; NaN: never."""

    arrival_s: FloatArray
    first_s: FloatArray
    finish_s: FloatArray  # of those that finished regularly
    output_tokens: IntArray


class RecordedRun:
    """A recording of the engine. Its tables are read at once, and whether they belong together is checked.

    Times come from the steps: what the engine told its scheduler while a step was still under way is an estimate.
    """

    def __init__(self, folder: Path | str) -> None:
        """Raise RecordingError where the recording is damaged, SimError where it is none of the engine's."""
        found = Recording(folder)
        self.folder = found.folder
        self.manifest: Mapping[str, Any] = found.manifest
        source = self.manifest.get("source")
        if source != "engine":
            raise SimError(f"{folder}: source {source!r} is not the engine's (zlab bench --out)")
        self.requests, self.steps = found.table("requests"), found.table("steps")
        self.events, self.blocks = found.table("events"), found.table("blocks")
        self.asked: Sequence[TraceRequest] = read_asked(folder)
        self.policy: Policy = policy_from_toml(self.manifest["policy_toml"], "the recording's policy")
        self.changes = [Change(change.step, change.policy) for change in read_changes(self.manifest)]
        self.limits = Limits(**self.manifest["limits"])
        self.complete = bool(self.manifest.get("complete"))
        self._check()

    def _check(self) -> None:
        where = self.folder
        if not self.steps.num_rows:
            raise RecordingError(f"{where}: holds no step")
        if not np.array_equal(self.column("step"), np.arange(self.steps.num_rows)):
            raise RecordingError(f"{where}: its steps are not numbered one after the other")
        starts, ends = self.column("start_s"), self.column("end_s")
        if (ends < starts).any() or (np.diff(ends) < 0).any():
            at = int(np.argmax((ends < starts) | (np.diff(ends, prepend=ends[0]) < 0)))
            raise RecordingError(f"{where}: time runs backwards at step {at}")
        numbers = np.sort(self.requests["number"].to_numpy())
        whole = len(numbers) == len(self.asked) if self.complete else len(numbers) <= len(self.asked)
        if not np.array_equal(numbers, np.arange(len(numbers))) or not whole:
            raise RecordingError(f"{where}: requests are missing: {len(numbers)} recorded, {len(self.asked)} asked")
        out = int(self.column("output_tokens").sum()), int(self.requests["output_tokens"].to_numpy().sum())
        if self.complete and out[0] != out[1]:
            raise RecordingError(f"{where}: its steps brought {out[0]:,} output tokens, its requests got {out[1]:,}")
        digest = decision_digest(self.events, self.blocks)
        if self.complete and digest != self.manifest["digest"]:
            raise RecordingError(
                f"{where}: its events have the digest {digest[:16]}, its manifest says {self.manifest['digest'][:16]}: "
                "one of them was changed"
            )

    # what came from outside

    def load(self, unfinished_end: bool = True) -> Workload:
        """What was asked, at the times at which it came, with the lengths that came out, by request number.

        A request that was called off or failed ends with as many tokens as it had got. One that was still alive does,
        too, or goes on as it was asked to. One that was refused is asked as it was.
        """
        cut_short = {"aborted", "failed", *(["unfinished"] if unfinished_end else [])}
        ended = {row["number"]: row for row in self.requests.select(["number", "status", "output_tokens"]).to_pylist()}
        found = []
        for number, asked in enumerate(self.asked[: self.requests.num_rows]):
            length, status = asked.output_tokens, ended[number]["status"]
            if status in cut_short or (length is None and status == "finished"):
                length = max(ended[number]["output_tokens"], 1)  # nothing else says when it ended
            arrival_s = float(self.arrival_s[number])
            found.append(replace(asked, id=str(number), output_tokens=length, arrival_s=arrival_s))
        size = self.manifest.get("prefix_block_size")
        kind, last = (None, None) if size is None else ("chained", "full")
        return Workload(found, WorkloadMeta(str(self.folder), block_size=size, block_id_kind=kind, last_block=last))

    @cached_property
    def arrival_s(self) -> FloatArray:
        """By request number."""
        return np.asarray(self._by_number("arrival_s"), dtype=np.float64)

    @property
    def closed(self) -> bool:
        """Everything was there at the start and nothing but lengths ended a request: decisions know no time."""
        ended = set(self.requests["status"].to_pylist()) <= {"finished", "refused", "unfinished"}
        at_once = not np.any(self._by_number("arrival_step"))
        return self.complete and ended and at_once and not self.stops and not self.waits_for_copies

    @property
    def stops(self) -> bool:
        """Some output was ended by a token, which the simulator cannot know but for the recording."""
        ended = zip(self.requests["number"].to_pylist(), self.requests["reason"].to_pylist(), strict=True)
        return any(reason == STOPPED and self.asked[number].output_tokens is None for number, reason in ended)

    @property
    def waits_for_copies(self) -> bool:
        """When a compression is joined depends on the clock."""
        policies = (self.policy, *(change.policy for change in self.changes))
        return any(one.compression.join is Join.WHEN_DONE for one in policies) and bool(self.compression_tasks)

    @property
    def planned_ahead(self) -> bool:
        """Whether the engine planned steps while the one before ran: on a GPU, where no output may stop early."""
        engine = self.manifest["engine"]
        on_gpu = not str(self.manifest["gpu"]).startswith("CPU")
        return bool(engine["overlap"]) and on_gpu and all(asked.output_tokens is not None for asked in self.asked)

    # steps

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the steps."""
        found: npt.NDArray[Any] = self.steps[name].to_numpy()
        return found

    @cached_property
    def _afresh(self) -> npt.NDArray[np.bool_]:
        """The steps before which no request was there but those that came with them."""
        served = self._served
        arrival_steps, finish_steps = self._by_number("arrival_step")[served], self._by_number("finish_step")[served]
        gone = np.where(finish_steps < 0, np.iinfo(np.int64).max, finish_steps)
        steps = np.arange(self.steps.num_rows)
        come = np.searchsorted(np.sort(arrival_steps), steps, side="left")  # before this step's own
        left = np.searchsorted(np.sort(gone), steps, side="right")
        return np.asarray(come - left <= 0, dtype=bool)

    @cached_property
    def idle_s(self) -> FloatArray:
        """Seconds before every step in which no request was there."""
        ends = self.column("end_s")
        before = np.concatenate([[float(self.arrival_s.min())], ends[:-1]])
        arrival_steps, arrival_s = self._by_number("arrival_step")[self._served], self.arrival_s[self._served]
        found = np.zeros(len(ends))
        for step in np.flatnonzero(self._afresh):
            own = arrival_s[arrival_steps == step]
            if len(own):
                found[step] = max(float(own.min()) - float(before[step]), 0.0)
        return found

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds from the end of the step before (for the first: the first arrival) to this one's end, but idle ones.

        So all of them and all idle ones add up to the makespan.
        """
        ends = self.column("end_s")
        spans = np.diff(ends, prepend=float(self.arrival_s.min()))
        return np.asarray(spans - self.idle_s, dtype=np.float64)

    @cached_property
    def between_s(self) -> FloatArray:
        """The part of `busy_s` in which no step ran."""
        inside = self.column("end_s") - self.column("start_s")
        return np.asarray(np.maximum(self.busy_s - inside, 0.0), dtype=np.float64)

    @cached_property
    def kinds(self) -> IntArray:
        """What every step did, as a place in KINDS. A step that follows one with compressions waits for them, too."""
        started = self.column("compressions") > 0
        compressing = started | np.concatenate([[False], started[:-1]]) | (self.column("compressing") > 0)
        decodes, prefills = self.column("decodes") > 0, self.column("prefills") > 0
        plain = np.select([decodes & prefills, prefills, decodes], [2, 1, 0], 4)
        return np.where(compressing, 3, plain).astype(np.int64)

    @cached_property
    def compression_tasks(self) -> list[tuple[int, int, int]]:
        """(step, tokens before, tokens kept) of every compression."""
        kinds = self.events["kind"].to_numpy()
        rows = np.flatnonzero((kinds == Kind.COMPRESSING) | (kinds == Kind.COMPRESSED))
        steps, numbers, values = (self.events[name].to_numpy()[rows] for name in ("step", "request", "value"))
        under_way: dict[int, int] = {}
        found: list[tuple[int, int, int]] = []
        for kind, step, number, value in zip(kinds[rows], steps, numbers, values, strict=True):
            if kind == Kind.COMPRESSING:
                under_way[int(number)] = len(found)
                found.append((int(step), int(value), int(value) - self.limits.block_size))  # if it never came back
            elif int(number) in under_way:
                place = under_way.pop(int(number))
                found[place] = (found[place][0], found[place][1], int(value))
        return found

    @cached_property
    def swapped_tokens(self) -> IntArray:
        """Token places copied to the host or back in every step."""
        kinds = self.events["kind"].to_numpy()
        rows = (kinds == Kind.SWAP_OUT) | (kinds == Kind.SWAP_IN)
        found = np.zeros(self.steps.num_rows, dtype=np.int64)
        steps, blocks = (self.events[name].to_numpy()[rows] for name in ("step", "num_blocks"))
        inside = steps < len(found)
        np.add.at(found, steps[inside], blocks[inside].astype(np.int64) * self.limits.block_size)
        return found

    def priced(self, cost: CostModel) -> FloatArray:
        """What the model says that each of these very steps takes."""
        columns = {name: self.column(name).astype(np.float64) for name in PRICED}
        if self.planned_ahead:
            columns["before_s"] = host_free_before(cost, columns, self.busy_s, self._afresh)
        work = step_seconds(cost, columns)
        compressions = np.zeros(len(work))
        for step, source, kept in self.compression_tasks:
            if step < len(work):
                compressions[step] += cost.compression_seconds(source, kept)
        compressions += np.where(self.column("compressions") > 0, cost.compression_start_s, 0.0)
        swaps = np.array([cost.swap_seconds(int(tokens)) if tokens else 0.0 for tokens in self.swapped_tokens])
        join = self.policy.compression.join
        return run_seconds(cost, work.tolist(), compressions.tolist(), swaps.tolist(), join)

    def moments(self) -> Moments:
        """When what happened to every request."""
        return moments(self.requests, self.steps, self.events)

    @cached_property
    def _served(self) -> npt.NDArray[np.bool_]:
        """Requests that were not refused, by number."""
        return np.asarray(self._by_number("status") != "refused", dtype=bool)

    def _by_number(self, name: str) -> npt.NDArray[Any]:
        order = np.argsort(self.requests["number"].to_numpy())
        found: npt.NDArray[Any] = self.requests[name].to_numpy()[order]
        return found


def moments(requests: pa.Table, steps: pa.Table, events: pa.Table) -> Moments:
    """The moments of a run's requests, by number, from the steps in which their events stand."""
    order = np.argsort(requests["number"].to_numpy())
    ends = steps["end_s"].to_numpy()
    found = {}
    for kind, first in ((Kind.FIRST, True), (Kind.FINISHED, False)):
        rows = np.flatnonzero(events["kind"].to_numpy() == kind)
        numbers, at = events["request"].to_numpy()[rows], events["step"].to_numpy()[rows]
        if first:  # a request that was thrown out computes its prompt again; the first time counts
            numbers, at = numbers[::-1], at[::-1]
        times = np.full(len(order), np.nan)
        inside = (at < len(ends)) & (numbers < len(order))
        times[numbers[inside]] = ends[at[inside]]
        found[kind] = times
    output = requests["output_tokens"].to_numpy()[order].astype(np.int64)
    return Moments(
        arrival_s=np.asarray(requests["arrival_s"].to_numpy()[order], dtype=np.float64),
        first_s=np.where(output > 0, found[Kind.FIRST], np.nan),
        finish_s=found[Kind.FINISHED],
        output_tokens=output,
    )


def decision_digest(events: pa.Table, blocks: pa.Table) -> str:
    """The digest that `policies.core.events.Journal` makes of these rows and their blocks."""
    rows = np.stack([events[name].to_numpy().astype("<i8") for name in ROW], axis=1)
    named = blocks["block"].to_numpy().astype("<i8")
    parts = (hashlib.sha256(np.ascontiguousarray(rows).tobytes()), hashlib.sha256(named.tobytes()))
    return hashlib.sha256(parts[0].digest() + parts[1].digest()).hexdigest()
