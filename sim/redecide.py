"""The decisions of a recorded run made again: arrivals, aborts, stops and finished copies happen where they happened.

Nothing here has a clock or moves a token. The scheduler is told, step by step, what it was told then; if it decides
the same, the digests are equal.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from policies.changes import PolicyChange, read_changes
from policies.core.events import Int64Array, Kind
from policies.core.limits import Limits
from policies.core.plan import Outcome, StepPlan
from policies.core.policy import Join, Policy
from policies.core.request import Phase
from policies.core.scheduler import Scheduler
from policies.record import block_columns, event_columns
from policies.spec import policy_from_toml, policy_mark
from sim.errors import SimError
from traces.recording import MemoryRecorder
from traces.workload import TraceRequest

GIVEN_BACK = frozenset({Kind.FREED, Kind.CACHED, Kind.LEFT, Kind.SLOT_FREED})
ENDS = frozenset({Kind.ABORTED, Kind.FAILED})


@dataclass(frozen=True)
class Tape:
    """What came from outside in a recorded run.

    Attributes:
        outside: step -> what was submitted, aborted and changed before it, in order: (row of the event, kind, request
            number, or the how-manieth change of the policy).
        stops: request number -> output tokens after which a stop token or string ended it.
        fails: step -> requests whose failure shows there, with the message.
        copied: step -> requests whose compression is known to be over before it.
        num_rows: events recorded.
    """

    outside: Mapping[int, list[tuple[int, Kind, int]]]
    stops: Mapping[int, int]
    fails: Mapping[int, dict[int, str]]
    copied: Mapping[int, list[int]]
    num_rows: int


@dataclass
class Redecided:
    """The same run's decisions: digest, and tables `events` and `blocks` to set beside the recorded ones."""

    digest: str
    num_steps: int
    tables: MemoryRecorder = field(default_factory=MemoryRecorder)


def redecide(
    manifest: Mapping[str, Any], requests: pa.Table, events: pa.Table, asked: Sequence[TraceRequest]
) -> Redecided:
    """Decide a recorded run again, by its own policy and limits; `asked[i]` is what request number i asked for.

    Raises SimError where the recording lacks what is needed.
    """
    numbers = sorted(requests["number"].to_pylist())
    num_arrived = int((events["kind"].to_numpy() == Kind.ARRIVED).sum())
    complete = bool(manifest.get("complete"))
    if len(asked) < num_arrived or (complete and numbers != list(range(len(asked)))):
        raise SimError(f"the recording has {len(numbers)} requests, {len(asked)} were asked: it is not complete")
    if "num_steps" not in manifest:
        raise SimError("the recording was stopped before its first checkpoint: it does not say how far it came")
    policy = policy_from_toml(manifest["policy_toml"], "the recording's policy")
    limits = Limits(**manifest["limits"])
    changes = read_changes(manifest)
    num_changed = int((events["kind"].to_numpy() == Kind.POLICY).sum())
    if len(changes) < num_changed:
        raise SimError(f"the policy was changed {num_changed} times, the manifest names {len(changes)} policies")
    driver = _Driver(policy, limits, manifest.get("prefix_block_size"), _tape(requests, events), asked, changes)
    return driver.run(None if manifest.get("complete") else manifest["num_steps"])


def _tape(requests: pa.Table, events: pa.Table) -> Tape:
    rows = list(zip(*(events[name].to_pylist() for name in ("step", "kind", "request")), strict=True))
    outside: dict[int, list[tuple[int, Kind, int]]] = defaultdict(list)
    copied: dict[int, list[int]] = defaultdict(list)
    fails: dict[int, dict[int, str]] = defaultdict(dict)
    num_changed = 0
    messages = dict(zip(requests["number"].to_pylist(), requests["message"].to_pylist(), strict=True))
    for index, (step, kind, number) in enumerate(rows):
        if kind == Kind.ARRIVED:
            outside[step].append((index, Kind.ARRIVED, number))
        elif kind == Kind.ABORTED:
            outside[step].append((_begin(rows, index), Kind.ABORTED, number))
        elif kind == Kind.POLICY:
            outside[step].append((index, Kind.POLICY, num_changed))
            num_changed += 1
        elif kind == Kind.FAILED:
            fails[step][number] = messages[number]
        if kind == Kind.COMPRESSED or kind in ENDS:
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
    """The first row of an end: what the request gives back comes before the row that says so."""
    step, _, number = rows[index]
    while (
        index > 0 and rows[index - 1][0] == step and rows[index - 1][2] == number and rows[index - 1][1] in GIVEN_BACK
    ):
        index -= 1
    return index


class _Driver:
    """Feeds a scheduler from a tape."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        prefix_block_size: int | None,
        tape: Tape,
        asked: Sequence[TraceRequest],
        changes: Sequence[PolicyChange],
    ) -> None:
        self._result = Redecided("", 0)
        self._num_rows = 0
        self._scheduler = Scheduler(policy, limits, self._write, prefix_block_size=prefix_block_size)
        self._tape = tape
        self._asked = asked
        self._changes = changes

    def run(self, most_steps: int | None) -> Redecided:
        """Decide until nothing is left to do, or for so many steps."""
        scheduler = self._scheduler
        while most_steps is None or scheduler.next_step < most_steps:
            if not self._hear():
                break
            plan = scheduler.plan(scheduler.next_step)
            if plan is None:
                break  # whatever was to come before this step has come
            scheduler.commit(plan, scheduler.next_step + 1, self._outcome(plan))
            scheduler.take_ended()
        else:  # the recording goes on for a little: what came in before the next step, and what was joined meanwhile
            if self._hear() and self._rows_written() < self._tape.num_rows:
                scheduler.plan(scheduler.next_step)
        self._result.digest = scheduler.digest()
        self._result.num_steps = scheduler.next_step
        return self._result

    def _hear(self) -> bool:
        """Tell the scheduler what came in before the next step; False if it has decided otherwise already.

        A plan that found nothing to do may have let go of a copy in between: it shows as rows that are still missing.
        """
        scheduler = self._scheduler
        step = scheduler.next_step
        if scheduler.state.policy.compression.join is Join.WHEN_DONE:
            scheduler.finished_compressing(self._tape.copied.get(step, ()))
        for index, kind, number in self._tape.outside.get(step, ()):
            request = scheduler.state.requests.get(number) if kind is not Kind.POLICY else None
            in_flight = request is not None and request.in_flight
            if self._rows_written() < index and not in_flight and scheduler.plan(step) is not None:
                return False
            if kind is Kind.POLICY:
                policy = self._changes[number].policy
                scheduler.replace_policy(policy, step, policy_mark(policy))
            elif kind is Kind.ARRIVED:
                asked = replace(self._asked[number], id=str(number))  # an id may have been used again
                scheduler.submit(asked, step)
            elif request is not None:
                scheduler.abort(request.id, step)
        return True

    def _outcome(self, plan: StepPlan) -> Outcome:
        """Who stopped in this step and who failed, as recorded."""
        state, tape = self._scheduler.state, self._tape
        members = [r for r in state.running.values() if r.phase is Phase.DECODE] if plan.num_decodes else []
        ending = [chunk.request for chunk in plan.prefills if chunk.last and chunk.request.target_tokens]
        stopped = [
            request.number
            for request in (*members, *ending)
            if state.decoding.tokens(request)[1] + 1 == tape.stops.get(request.number)
        ]
        failed = {
            number: message
            for step, in_flight in ((plan.step, False), (plan.step + 1, True))
            for number, message in tape.fails.get(step, {}).items()
            if number in state.requests and state.requests[number].in_flight is in_flight
        }
        return Outcome(stopped=stopped, failed=failed)

    def _rows_written(self) -> int:
        return self._num_rows + len(self._scheduler.state.journal.rows) // 5

    def _write(self, rows: Int64Array, blocks: Int64Array) -> None:
        self._num_rows += len(rows)
        self._result.tables.write("events", event_columns(rows))
        self._result.tables.write("blocks", block_columns(rows, blocks))
