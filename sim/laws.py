"""What must hold of a finished run, whatever the policy: the laws of docs/DESIGN.md that its tables can show."""

from collections import Counter

import numpy as np

from policies.core.events import Kind
from policies.core.scheduler import Scheduler
from policies.record import PHASE_COLUMNS
from traces.run import Run

ENDS = {Kind.FINISHED: "finished", Kind.REFUSED: "refused", Kind.ABORTED: "aborted", Kind.FAILED: "failed"}
CLOCK_S = 1e-6  # times are counted in ns and written in s


def broken_law(run: Run, scheduler: Scheduler) -> str | None:
    """The first law that the run broke, in words; None where all hold. What holds at each step, an audit counts."""
    for law in (_everything_given_back, _one_end_each, _times_add_up, _tokens_add_up):
        words = law(run, scheduler)
        if words is not None:
            return words
    return None


def _everything_given_back(_: Run, scheduler: Scheduler) -> str | None:
    pool = scheduler.state.pool
    alive = [request.id for request in scheduler.live()]
    if alive:
        return f"{len(alive)} requests never ended, the first {alive[0]!r}"
    if pool.num_free != pool.num_blocks:
        return f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks were never given back"
    return None


def _one_end_each(run: Run, _: Scheduler) -> str | None:
    kinds, numbers = run.events["kind"].to_numpy(), run.events["request"].to_numpy()
    arrived = Counter(numbers[kinds == Kind.ARRIVED].tolist())
    ends: dict[int, list[str]] = {number: [] for number in arrived}
    for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
        if kind in ENDS:
            ends.setdefault(number, []).append(ENDS[Kind(kind)])
    for row in run.requests.select(["number", "id", "status"]).to_pylist():
        if arrived.get(row["number"]) != 1 or ends.get(row["number"]) != [row["status"]]:
            seen = ", ".join(ends.get(row["number"], [])) or "no end"
            return f"request {row['id']!r} is {row['status']}, its events say {seen}"
    if len(arrived) != run.requests.num_rows:
        return f"{len(arrived)} requests arrived, {run.requests.num_rows} are accounted for"
    return None


def _times_add_up(run: Run, _: Scheduler) -> str | None:
    table = run.requests
    phases = sum(table[name].to_numpy() for name in (*PHASE_COLUMNS.values(), "swapped_s"))
    spans = table["finish_s"].to_numpy() - table["arrival_s"].to_numpy()
    refused = np.array([status == "refused" for status in table["status"].to_pylist()], dtype=bool)
    off = ~refused & ~(np.abs(phases - spans) <= CLOCK_S)
    if off.any():
        at = int(np.argmax(off))
        return f"request {table['id'][at].as_py()!r} took {spans[at]:.6f} s, its phases add up to {phases[at]:.6f} s"
    return None


def _tokens_add_up(run: Run, _: Scheduler) -> str | None:
    of_steps = int(run.steps["output_tokens"].to_numpy().sum())
    of_requests = int(run.requests["output_tokens"].to_numpy().sum())
    if of_steps != of_requests:
        return f"steps gave out {of_steps} tokens, requests have {of_requests}"
    return None
