"""An engine's recording, checked and prepared for the simulator.

`RecordedRun` gives what each step did and how long it took. `redecide` makes the decisions of the
run again: it feeds a scheduler with the arrivals, aborts, stops and finished copies of the
recording at the steps of the recording. If the scheduler decides the same, the digests are equal.
No clock and no tensor takes part.

`what_if` prepares the requests of a recorded run for another policy on the same machine. A
recording does not hold its workload, but it holds what brings the workload back: the name of a
made-up one, what an engine was asked, or, for requests without prefixes, the table of requests. The
hash of the workload in the manifest decides whether it is the same one.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zlab.policies.core.journal import Int64Array
from zlab.policies.core.plan import SchedulerLimits, StepOutcome, StepPlan
from zlab.policies.core.policy import Join, Policy
from zlab.policies.core.request import Request
from zlab.policies.core.scheduler import Scheduler
from zlab.policies.snapshot import PolicyChange, read_changes
from zlab.policies.spec import policy_from_toml, policy_mark
from zlab.policies.step_log import block_columns, event_columns
from zlab.sim.cost_model import (
    Change,
    CostModel,
    FloatArray,
    host_free_before,
    run_seconds,
    step_seconds,
)
from zlab.sim.profiles import open_profile, profile_names
from zlab.sim.replay import check_blocks, find_cost, lengthen, memory_excess
from zlab.sim.specs import Gpu, ModelSpec, SimError, find_gpu, find_model, gpu_of_card
from zlab.traces.recording import MemoryRecorder, Recording, RecordingError, read_asked
from zlab.traces.schema import EVENT_COLUMNS, EventKind, WrittenBy
from zlab.traces.synthetic import PREFIX, make_workload, most_requests
from zlab.traces.workload import TraceError, TraceRequest, Workload, WorkloadMeta

IntArray = npt.NDArray[np.int64]
PRICED = ("decodes", "context_tokens", "prefills", "prefill_tokens", "prefill_pairs")
KINDS = ("decode only", "prefill only", "mixed", "with compression", "other")
STOPPED = "stop"


@dataclass(frozen=True)
class Moments:
    """Event times of each request in seconds: arrival, end of the step of its first token, end of
    the step in which it finished. NaN where the event did not happen. Arrays of shape [requests].
    """

    arrival_s: FloatArray
    first_s: FloatArray
    finish_s: FloatArray  # NaN for requests that were aborted, refused or failed
    output_tokens: IntArray


class RecordedRun:
    """A recording of the engine. The tables are read and checked when the object is created.

    Times come from the steps table. The times in the events table are estimates, because the engine
    makes many decisions while a step still runs.
    """

    def __init__(self, folder: Path | str) -> None:
        """Read a recording.

        Raises:
            RecordingError: The recording is damaged.
            SimError: The recording was not written by the engine.
        """
        found = Recording(folder)
        self.folder = found.folder
        self.manifest: Mapping[str, Any] = found.manifest
        source = self.manifest.get("source")
        if source != "engine":
            raise SimError(f"{folder}: source {source!r} is not the engine's (zlab bench --out)")
        self.requests, self.steps = found.table("requests"), found.table("steps")
        self.events, self.blocks = found.table("events"), found.table("blocks")
        self.asked: Sequence[TraceRequest] = read_asked(folder)
        self.policy: Policy = policy_from_toml(
            self.manifest["policy_toml"], "the recording's policy"
        )
        self.changes = [
            Change(change.step, change.policy) for change in read_changes(self.manifest)
        ]
        self.limits = SchedulerLimits(**self.manifest["limits"])
        self.complete = bool(self.manifest.get("complete"))
        self._check()

    def _check(self) -> None:
        where = self.folder
        if not self.steps.num_rows:
            raise RecordingError(f"{where}: it has no steps")
        if not np.array_equal(self.column("step"), np.arange(self.steps.num_rows)):
            raise RecordingError(f"{where}: its steps are not numbered one after the other")
        starts, ends = self.column("start_s"), self.column("end_s")
        if (ends < starts).any() or (np.diff(ends) < 0).any():
            at = int(np.argmax((ends < starts) | (np.diff(ends, prepend=ends[0]) < 0)))
            raise RecordingError(f"{where}: time decreases at step {at}")
        numbers = np.sort(self.requests["number"].to_numpy())
        whole = (
            len(numbers) == len(self.asked) if self.complete else len(numbers) <= len(self.asked)
        )
        if not np.array_equal(numbers, np.arange(len(numbers))) or not whole:
            raise RecordingError(
                f"{where}: requests are missing: {len(numbers)} recorded, "
                f"{len(self.asked)} submitted"
            )
        out = (
            int(self.column("output_tokens").sum()),
            int(self.requests["output_tokens"].to_numpy().sum()),
        )
        if self.complete and out[0] != out[1]:
            raise RecordingError(
                f"{where}: its steps have {out[0]:,} output tokens, its requests {out[1]:,}"
            )
        digest = decision_digest(self.events, self.blocks)
        if self.complete and digest != self.manifest["digest"]:
            raise RecordingError(
                f"{where}: its events have the digest {digest[:16]}, its manifest says "
                f"{self.manifest['digest'][:16]}: "
                "one of them was changed"
            )

    # input of the run

    def load(self, unfinished_end: bool = True) -> Workload:
        """Return the recorded requests as a workload, with their arrival times and output lengths,
        by request number.

        A request that was aborted or failed gets the number of tokens that it had produced. The
        same holds for a request that had not ended, unless `unfinished_end` is False; then it keeps
        the length that was asked for. A refused request is unchanged.
        """
        cut_short = {"aborted", "failed", *(["unfinished"] if unfinished_end else [])}
        ended = {
            row["number"]: row
            for row in self.requests.select(["number", "status", "output_tokens"]).to_pylist()
        }
        found = []
        for number, asked in enumerate(self.asked[: self.requests.num_rows]):
            length, status = asked.output_tokens, ended[number]["status"]
            if status in cut_short or (length is None and status == "finished"):
                # the recording is the only source of its length
                length = max(ended[number]["output_tokens"], 1)
            arrival_s = float(self.arrival_s[number])
            found.append(replace(asked, id=str(number), output_tokens=length, arrival_s=arrival_s))
        size = self.manifest.get("prefix_block_size")
        kind, last = (None, None) if size is None else ("chained", "full")
        return Workload(
            found,
            WorkloadMeta(str(self.folder), block_size=size, block_id_kind=kind, last_block=last),
        )

    @cached_property
    def arrival_s(self) -> FloatArray:
        """Arrival times in seconds, by request number. Shape [requests]."""
        return np.asarray(self._by_number("arrival_s"), dtype=np.float64)

    @property
    def closed(self) -> bool:
        """Whether the decisions of the run do not depend on time: all requests were there at the
        start, and each ended because of its length.
        """
        ended = set(self.requests["status"].to_pylist()) <= {"finished", "refused", "unfinished"}
        at_once = not np.any(self._by_number("arrival_step"))
        return self.complete and ended and at_once and not self.stops and not self.waits_for_copies

    @property
    def stops(self) -> bool:
        """Whether a stop token or stop string ended an output. The simulator knows such lengths
        only from the recording.
        """
        ended = zip(
            self.requests["number"].to_pylist(), self.requests["reason"].to_pylist(), strict=True
        )
        return any(
            reason == STOPPED and self.asked[number].output_tokens is None
            for number, reason in ended
        )

    @property
    def waits_for_copies(self) -> bool:
        """Whether the step of a join depends on the clock (join `when_done`, and something was
        compressed).
        """
        policies = (self.policy, *(change.policy for change in self.changes))
        return any(one.compression.join is Join.WHEN_DONE for one in policies) and bool(
            self.compression_tasks
        )

    @property
    def planned_ahead(self) -> bool:
        """Whether the engine planned each step while the step before it ran. It does so on a GPU
        when no output may stop early.
        """
        engine = self.manifest["engine"]
        on_gpu = not str(self.manifest["gpu"]).startswith("CPU")
        return (
            bool(engine["overlap"])
            and on_gpu
            and all(asked.output_tokens is not None for asked in self.asked)
        )

    # steps

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of the steps table. Shape [steps]."""
        found: npt.NDArray[Any] = self.steps[name].to_numpy()
        return found

    @cached_property
    def _afresh(self) -> npt.NDArray[np.bool_]:
        """Whether, before each step, no request was present except those that came with the step.
        Shape [steps].
        """
        served = self._served
        arrival_steps, finish_steps = (
            self._by_number("arrival_step")[served],
            self._by_number("finish_step")[served],
        )
        gone = np.where(finish_steps < 0, np.iinfo(np.int64).max, finish_steps)
        steps = np.arange(self.steps.num_rows)
        # without the arrivals of the step itself
        come = np.searchsorted(np.sort(arrival_steps), steps, side="left")
        left = np.searchsorted(np.sort(gone), steps, side="right")
        return np.asarray(come - left <= 0, dtype=bool)

    @cached_property
    def idle_s(self) -> FloatArray:
        """Seconds before each step in which no request was present. Shape [steps]."""
        ends = self.column("end_s")
        before = np.concatenate([[float(self.arrival_s.min())], ends[:-1]])
        arrival_steps, arrival_s = (
            self._by_number("arrival_step")[self._served],
            self.arrival_s[self._served],
        )
        found = np.zeros(len(ends))
        for step in np.flatnonzero(self._afresh):
            own = arrival_s[arrival_steps == step]
            if len(own):
                found[step] = max(float(own.min()) - float(before[step]), 0.0)
        return found

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds from the end of the step before (for the first step: from the first arrival) to
        the end of the step, without idle time. Shape [steps].

        The sum of `busy_s` and `idle_s` over all steps is the makespan.
        """
        ends = self.column("end_s")
        spans = np.diff(ends, prepend=float(self.arrival_s.min()))
        return np.asarray(spans - self.idle_s, dtype=np.float64)

    @cached_property
    def between_s(self) -> FloatArray:
        """The part of `busy_s` in which no step ran, in seconds. Shape [steps]."""
        inside = self.column("end_s") - self.column("start_s")
        return np.asarray(np.maximum(self.busy_s - inside, 0.0), dtype=np.float64)

    @cached_property
    def kinds(self) -> IntArray:
        """What each step did, as an index into KINDS. Shape [steps]. A step after a step with
        compressions counts as one with compressions, because it waits for them.
        """
        started = self.column("compressions") > 0
        compressing = (
            started | np.concatenate([[False], started[:-1]]) | (self.column("compressing") > 0)
        )
        decodes, prefills = self.column("decodes") > 0, self.column("prefills") > 0
        plain = np.select([decodes & prefills, prefills, decodes], [2, 1, 0], 4)
        return np.where(compressing, 3, plain).astype(np.int64)

    @cached_property
    def compression_tasks(self) -> list[tuple[int, int, int]]:
        """Each compression as (step, tokens before, tokens kept)."""
        kinds = self.events["kind"].to_numpy()
        rows = np.flatnonzero((kinds == EventKind.COMPRESSING) | (kinds == EventKind.COMPRESSED))
        steps, numbers, values = (
            self.events[name].to_numpy()[rows] for name in ("step", "request", "value")
        )
        under_way: dict[int, int] = {}
        found: list[tuple[int, int, int]] = []
        for kind, step, number, value in zip(kinds[rows], steps, numbers, values, strict=True):
            if kind == EventKind.COMPRESSING:
                under_way[int(number)] = len(found)
                found.append(
                    (int(step), int(value), int(value) - self.limits.block_size)
                )  # kept tokens of a compression that was never joined
            elif int(number) in under_way:
                place = under_way.pop(int(number))
                found[place] = (found[place][0], found[place][1], int(value))
        return found

    @cached_property
    def swapped_tokens(self) -> IntArray:
        """Token positions copied to or from host memory in each step. Shape [steps]."""
        kinds = self.events["kind"].to_numpy()
        rows = (kinds == EventKind.SWAP_OUT) | (kinds == EventKind.SWAP_IN)
        found = np.zeros(self.steps.num_rows, dtype=np.int64)
        steps, blocks = (self.events[name].to_numpy()[rows] for name in ("step", "num_blocks"))
        inside = steps < len(found)
        np.add.at(found, steps[inside], blocks[inside].astype(np.int64) * self.limits.block_size)
        return found

    def priced(self, cost: CostModel) -> FloatArray:
        """Return the seconds that the cost model gives for each recorded step. Shape [steps]."""
        columns = {name: self.column(name).astype(np.float64) for name in PRICED}
        if self.planned_ahead:
            columns["before_s"] = host_free_before(cost, columns, self.busy_s, self._afresh)
        work = step_seconds(cost, columns)
        compressions = np.zeros(len(work))
        for step, source, kept in self.compression_tasks:
            if step < len(work):
                compressions[step] += cost.compression_seconds(source, kept)
        compressions += np.where(self.column("compressions") > 0, cost.compression_start_s, 0.0)
        swaps = np.array(
            [cost.swap_seconds(int(tokens)) if tokens else 0.0 for tokens in self.swapped_tokens]
        )
        join = self.policy.compression.join
        return run_seconds(cost, work.tolist(), compressions.tolist(), swaps.tolist(), join)

    def moments(self) -> Moments:
        """Return the event times of all requests."""
        return moments(self.requests, self.steps, self.events)

    @cached_property
    def _served(self) -> npt.NDArray[np.bool_]:
        """Whether each request was admitted at all (not refused), by number."""
        return np.asarray(self._by_number("status") != "refused", dtype=bool)

    def _by_number(self, name: str) -> npt.NDArray[Any]:
        order = np.argsort(self.requests["number"].to_numpy())
        found: npt.NDArray[Any] = self.requests[name].to_numpy()[order]
        return found


def moments(requests: pa.Table, steps: pa.Table, events: pa.Table) -> Moments:
    """Return the event times of a run's requests, by request number.

    Args:
        requests: The requests table.
        steps: The steps table; an event happens at the end of its step.
        events: The events table.
    """
    order = np.argsort(requests["number"].to_numpy())
    ends = steps["end_s"].to_numpy()
    found = {}
    for kind, first in ((EventKind.FIRST, True), (EventKind.FINISHED, False)):
        rows = np.flatnonzero(events["kind"].to_numpy() == kind)
        numbers, at = events["request"].to_numpy()[rows], events["step"].to_numpy()[rows]
        if first:  # a preempted request computes its prompt again; the first time counts
            numbers, at = numbers[::-1], at[::-1]
        times = np.full(len(order), np.nan)
        inside = (at < len(ends)) & (numbers < len(order))
        times[numbers[inside]] = ends[at[inside]]
        found[kind] = times
    output = requests["output_tokens"].to_numpy()[order].astype(np.int64)
    return Moments(
        arrival_s=np.asarray(requests["arrival_s"].to_numpy()[order], dtype=np.float64),
        first_s=np.where(output > 0, found[EventKind.FIRST], np.nan),
        finish_s=found[EventKind.FINISHED],
        output_tokens=output,
    )


def decision_digest(events: pa.Table, blocks: pa.Table) -> str:
    """Return the digest that `zlab.policies.core.journal.Journal` computes over these event rows
    and their blocks.
    """
    rows = np.stack([events[name].to_numpy().astype("<i8") for name in EVENT_COLUMNS], axis=1)
    named = blocks["block"].to_numpy().astype("<i8")
    parts = (hashlib.sha256(np.ascontiguousarray(rows).tobytes()), hashlib.sha256(named.tobytes()))
    return hashlib.sha256(parts[0].digest() + parts[1].digest()).hexdigest()


GIVEN_BACK = frozenset(kind for kind in EventKind if kind.effect.stage is WrittenBy.BEFORE_END)
ENDS = frozenset({EventKind.ABORTED, EventKind.FAILED})


@dataclass(frozen=True)
class Tape:
    """The external inputs of a recorded run.

    Attributes:
        outside: Step -> the inputs before it, in order: (row of the event, kind, request number).
            The kinds are arrivals, aborts, corrupted requests and policy changes; for a policy
            change the last item is the index of the change.
        stops: Request number -> output tokens after which a stop token or stop string ended it.
        fails: Step -> requests whose failure shows in it, with the message.
        copied: Step -> requests whose compression is known to be finished before it.
        num_rows: Number of recorded events.
    """

    outside: Mapping[int, list[tuple[int, EventKind, int]]]
    stops: Mapping[int, int]
    fails: Mapping[int, dict[int, str]]
    copied: Mapping[int, list[int]]
    num_rows: int


@dataclass
class Redecided:
    """The result of `redecide`: the decision digest, and the tables `events` and `blocks` to
    compare with the recorded ones.
    """

    digest: str
    num_steps: int
    tables: MemoryRecorder = field(default_factory=MemoryRecorder)


def redecide(
    manifest: Mapping[str, Any], requests: pa.Table, events: pa.Table, asked: Sequence[TraceRequest]
) -> Redecided:
    """Decide a recorded run again under its own policy and limits.

    Args:
        manifest: The recording's manifest.
        requests: The requests table.
        events: The events table.
        asked: The requests as they were submitted, by request number.

    Returns:
        The digest and tables of the new decisions.

    Raises:
        SimError: The recording lacks requests, steps or policies that are needed.
    """
    numbers = sorted(requests["number"].to_pylist())
    num_arrived = int((events["kind"].to_numpy() == EventKind.ARRIVED).sum())
    complete = bool(manifest.get("complete"))
    if len(asked) < num_arrived or (complete and numbers != list(range(len(asked)))):
        raise SimError(
            f"the recording has {len(numbers)} requests, {len(asked)} were asked: it is not "
            f"complete"
        )
    if "num_steps" not in manifest:
        raise SimError(
            "the recording was stopped before its first checkpoint: it does not say how many "
            "steps it has"
        )
    policy = policy_from_toml(manifest["policy_toml"], "the recording's policy")
    limits = SchedulerLimits(**manifest["limits"])
    changes = read_changes(manifest)
    num_changed = int((events["kind"].to_numpy() == EventKind.POLICY).sum())
    if len(changes) < num_changed:
        raise SimError(
            f"the policy was changed {num_changed} times, the manifest names {len(changes)} "
            f"policies"
        )
    driver = _Driver(
        policy, limits, manifest.get("prefix_block_size"), _tape(requests, events), asked, changes
    )
    return driver.run(None if manifest.get("complete") else manifest["num_steps"])


def _tape(requests: pa.Table, events: pa.Table) -> Tape:
    rows = list(
        zip(*(events[name].to_pylist() for name in ("step", "kind", "request")), strict=True)
    )
    outside: dict[int, list[tuple[int, EventKind, int]]] = defaultdict(list)
    copied: dict[int, list[int]] = defaultdict(list)
    fails: dict[int, dict[int, str]] = defaultdict(dict)
    num_changed = 0
    corrupted: set[int] = set()
    messages = dict(
        zip(requests["number"].to_pylist(), requests["message"].to_pylist(), strict=True)
    )
    for index, (step, kind, number) in enumerate(rows):
        if kind == EventKind.ARRIVED:
            outside[step].append((index, EventKind.ARRIVED, number))
        elif kind == EventKind.ABORTED:
            outside[step].append((_begin(rows, index), EventKind.ABORTED, number))
        elif kind == EventKind.POLICY:
            outside[step].append((index, EventKind.POLICY, num_changed))
            num_changed += 1
        elif kind == EventKind.CORRUPTED:
            outside[step].append((index, EventKind.CORRUPTED, number))
            corrupted.add(number)
        # otherwise the corruption is the cause
        elif kind == EventKind.FAILED and number not in corrupted:
            fails[step][number] = messages[number]
        if kind == EventKind.COMPRESSED or kind in ENDS:
            copied[step].append(number)
    for happened in outside.values():
        happened.sort()
    stops = {
        row["number"]: row["output_tokens"]
        for row in requests.select(["number", "status", "reason", "output_tokens"]).to_pylist()
        if row["status"] == "finished" and row["reason"] == "stop"
    }
    return Tape(outside, stops, fails, copied, len(rows))


def _begin(rows: Sequence[tuple[int, int, int]], index: int) -> int:
    """Return the first row of the end of a request: the releases of its blocks and slot precede the
    row of the end itself.
    """
    step, _, number = rows[index]
    while (
        index > 0
        and rows[index - 1][0] == step
        and rows[index - 1][2] == number
        and rows[index - 1][1] in GIVEN_BACK
    ):
        index -= 1
    return index


class _Driver:
    """Feeds a scheduler with the inputs of a tape."""

    def __init__(
        self,
        policy: Policy,
        limits: SchedulerLimits,
        prefix_block_size: int | None,
        tape: Tape,
        asked: Sequence[TraceRequest],
        changes: Sequence[PolicyChange],
    ) -> None:
        self._result = Redecided("", 0)
        self._num_rows = 0
        self._scheduler = Scheduler(
            policy, limits, self._write, prefix_block_size=prefix_block_size
        )
        self._tape = tape
        self._asked = asked
        self._changes = changes
        self._submitted: dict[int, Request] = {}  # requests that are found corrupted later
        self._damaged = {
            number
            for happened in tape.outside.values()
            for _, kind, number in happened
            if kind is EventKind.CORRUPTED
        }

    def run(self, most_steps: int | None) -> Redecided:
        """Decide until no work is left, or for `most_steps` steps."""
        scheduler = self._scheduler
        while most_steps is None or scheduler.next_step < most_steps:
            if not self._hear():
                break
            plan = scheduler.plan(scheduler.next_step)
            if plan is None:
                break  # all inputs before this step have been read
            scheduler.commit(plan, scheduler.next_step + 1, self._outcome(plan))
            scheduler.take_finished()
        # The recording contains the inputs before the next step and the joins that followed, so
        # these rows are made, too.
        else:
            if self._hear() and self._rows_written() < self._tape.num_rows:
                scheduler.plan(scheduler.next_step)
        self._result.digest = scheduler.digest()
        self._result.num_steps = scheduler.next_step
        return self._result

    def _hear(self) -> bool:
        """Give the scheduler the inputs before the next step. Return False if its decisions already
        differ from the recording.

        A call of `plan` that finds no work may still join a copy. The recording shows that call
        only by its event rows, so a missing row means that `plan` is called here.
        """
        scheduler = self._scheduler
        step = scheduler.next_step
        if scheduler.policy.compression.join is Join.WHEN_DONE:
            scheduler.finished_compressions(self._tape.copied.get(step, ()))
        for index, kind, number in self._tape.outside.get(step, ()):
            request = scheduler.request(number) if kind is not EventKind.POLICY else None
            in_flight = request is not None and request.in_flight
            if self._rows_written() < index and not in_flight and scheduler.plan(step) is not None:
                return False
            if kind is EventKind.POLICY:
                policy = self._changes[number].policy
                scheduler.replace_policy(policy, step, policy_mark(policy))
            elif kind is EventKind.ARRIVED:
                asked = replace(
                    self._asked[number], id=str(number)
                )  # an id may occur more than once
                request = scheduler.submit(asked, step)
                if number in self._damaged:
                    self._submitted[number] = request
            elif kind is EventKind.CORRUPTED:
                scheduler.invalidate(self._submitted[number], "", step)
            elif request is not None:
                scheduler.abort(request.id, step)
        return True

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        """Return the requests that stopped and that failed in this step, as recorded."""
        scheduler, tape = self._scheduler, self._tape
        members = scheduler.decoding_requests() if plan.num_decodes else []
        ending = [
            chunk.request for chunk in plan.prefills if chunk.last and chunk.request.target_tokens
        ]
        stopped = [
            request.number
            for request in (*members, *ending)
            if scheduler.num_output_tokens(request.number) + 1 == tape.stops.get(request.number)
        ]
        failed = {
            number: message
            for step, in_flight in ((plan.step, False), (plan.step + 1, True))
            for number, message in tape.fails.get(step, {}).items()
            if (request := scheduler.request(number)) is not None and request.in_flight is in_flight
        }
        return StepOutcome(stopped=stopped, failed=failed)

    def _rows_written(self) -> int:
        return self._num_rows + self._scheduler.num_unflushed_events

    def _write(self, rows: Int64Array, blocks: Int64Array) -> None:
        self._num_rows += len(rows)
        self._result.tables.write("events", event_columns(rows))
        self._result.tables.write("blocks", block_columns(rows, blocks))


MOST_REQUESTS = 1_000_000  # of a workload that is made again
ROOFLINE = "roofline"
DIGITS = 9  # a recording keeps nanoseconds, and a trace has no more


@dataclass(frozen=True)
class Variant:
    """The requests and the machine of a recorded run, under another policy.

    Attributes:
        workload: The requests, before their outputs are lengthened.
        policy: The other policy.
        gpu: Name of the GPU.
        model: Name of the model.
        limits: Pool and bounds of a step.
        cost: Name of the measured profile that gives the times; None: the roofline.
        plan_ahead: Whether a step is planned while the one before runs.
        length_multiplier: Output tokens of requests that get compressed, relative to the workload.
        pretended: Why the GPU cannot hold this pool under the policy; None where it can.
    """

    workload: Workload
    policy: Policy
    gpu: str
    model: str
    limits: SchedulerLimits
    cost: str | None
    plan_ahead: bool
    length_multiplier: float
    pretended: str | None


def recorded_policy(recording: Recording) -> Policy:
    """Return the policy that a run began with. Raises PolicyError."""
    return policy_from_toml(str(recording.manifest.get("policy_toml")), "the recording's policy")


def what_if(recording: Recording, policy: Policy) -> Variant:
    """Return what to simulate for the requests of a recorded run under another policy.

    Raises:
        SimError: The requests cannot be made again, or the simulator does not know the machine.
        TraceError: The recording cannot be read.
        SchedulerError: The policy cannot serve with this pool.
    """
    manifest = recording.manifest
    try:
        gpu = find_gpu(gpu_of_card(str(manifest.get("gpu"))))
    except SimError as error:
        raise SimError(f"this run was made on {manifest.get('gpu')!r}: {error}") from error
    model = find_model(str(manifest.get("model")))
    try:
        limits = SchedulerLimits(**manifest["limits"])
    except (KeyError, TypeError) as error:
        raise SimError(f"{recording.folder}: its manifest has no limits: {error}") from error
    cost = _profile_of(recording, gpu, model)
    find_cost(cost, policy, gpu, model, limits.block_size)
    workload = recorded_workload(recording)
    Scheduler(policy, limits, prefix_block_size=workload.meta.block_size)
    check_blocks(workload, limits.block_size, [policy])
    return Variant(
        workload,
        policy,
        gpu.name,
        model.name,
        limits,
        cost,
        bool(manifest.get("plan_ahead", cost is not None)),
        _multiplier(recording),
        memory_excess(gpu, model, (policy,), limits),
    )


def recorded_workload(recording: Recording) -> Workload:
    """Return the requests that a recorded run was given, before their outputs were lengthened.

    Raises:
        SimError: They cannot be made again; the message says why.
        TraceError: The recording cannot be read.
    """
    manifest = recording.manifest
    if manifest.get("source") == "engine":
        return RecordedRun(recording.folder).load()
    wanted = manifest.get("workload_sha256")
    for workload in _candidates(recording):
        if _as_recorded(recording, workload).sha256 == wanted:
            return workload
    about = manifest.get("workload")
    name = about.get("name") if isinstance(about, dict) else None
    unfinished = "" if recording.complete else ", and the run has not come to its end"
    raise SimError(
        f"the requests of this run cannot be made again: {name!r} is not made up by rule, and the "
        f"recording does not keep the prefixes of its prompts{unfinished}. Replay the trace itself "
        f"under both policies: zlab compare TRACE --policies A,B"
    )


def _candidates(recording: Recording) -> Iterator[Workload]:
    """Yield workloads that may be the recorded one."""
    about = recording.manifest.get("workload")
    name = about.get("name") if isinstance(about, dict) else None
    count = about.get("num_requests") if isinstance(about, dict) else None
    if isinstance(name, str) and name.startswith(PREFIX):
        try:
            if most_requests(name) <= MOST_REQUESTS:
                whole = make_workload(name)
                yield whole
                if isinstance(count, int) and 0 < count < len(whole):
                    yield Workload(list(whole)[:count], whole.meta)
        except TraceError:  # a name that this version does not know
            pass
    if _multiplier(recording) == 1.0:
        found = _from_table(recording, str(name))
        yield found
        if not any(request.arrival_s for request in found):  # all at once, from a batch
            yield Workload([replace(one, arrival_s=None) for one in found], found.meta)


def _multiplier(recording: Recording) -> float:
    found = recording.manifest.get("length_multiplier", 1.0)
    return float(found) if isinstance(found, int | float) and found > 0 else 1.0


def _as_recorded(recording: Recording, workload: Workload) -> Workload:
    """Lengthen outputs as the recorded run did."""
    multiplier = _multiplier(recording)
    size = recording.manifest.get("block_size")
    if multiplier == 1.0 or not isinstance(size, int):
        return workload
    floor = recorded_policy(recording).budget.floor(size)
    return workload if floor is None else lengthen(workload, multiplier, floor * size)


ASKED = ("number", "id", "prompt_tokens", "asked_output_tokens", "arrival_s", "max_tokens")
ASKED_TOO = ("session", "cls", "priority")


def _from_table(recording: Recording, name: str) -> Workload:
    """Return the requests as the table of requests has them; it knows of no prefix."""
    rows: list[dict[str, Any]] = (
        recording.table("requests", ASKED + ASKED_TOO).sort_by("number").to_pylist()
    )
    found = [
        TraceRequest(
            id=row["id"],
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["asked_output_tokens"],
            arrival_s=round(row["arrival_s"], DIGITS),
            max_tokens=row["max_tokens"],
            **{key: row[key] for key in ASKED_TOO},
        )
        for row in rows
    ]
    return Workload(found, WorkloadMeta(name))


def _profile_of(recording: Recording, gpu: Gpu, model: ModelSpec) -> str | None:
    """Return the profile that a run's times came from; of a measured run, the newest one of its
    GPU and model. None is the roofline.

    Raises SimError where the profile of a simulated run is not among those that come along.
    """
    cost = recording.manifest.get("cost")
    source = str(cost.get("source")) if isinstance(cost, dict) else ROOFLINE
    if source == ROOFLINE:
        return None
    names = profile_names()
    if recording.manifest.get("source") != "engine":
        for name in names:
            profile = open_profile(name)
            if source == f"{profile.name} {profile.date}":
                return name
        raise SimError(
            f"the times of this run come from the profile {source!r}, which does not come with "
            f"this version: zlab compare TRACE --profile FILE"
        )
    profiles = {name: open_profile(name) for name in names}
    fitting = [
        name
        for name, profile in profiles.items()
        if (profile.gpu, profile.model) == (gpu.name, model.name)
    ]
    return max(fitting, key=lambda name: profiles[name].date, default=None)
