"""The laws of docs/DESIGN.md as checks of a finished run; each raises AssertionError with what it
saw.
"""

from collections import Counter
from itertools import pairwise

from tests.policies.drive import Run
from zlab.policies.ordering import FirstCome
from zlab.traces.schema import EventKind, Phase, Reason, Status

TERMINAL = {
    EventKind.FINISHED: Status.FINISHED,
    EventKind.REFUSED: Status.REFUSED,
    EventKind.ABORTED: Status.ABORTED,
    EventKind.FAILED: Status.FAILED,
}
ACCOUNT = (
    "phase_ns",
    "arrival_ns",
    "first_admitted_ns",
    "first_token_ns",
    "finish_ns",
    "generated",
    "hit_tokens",
    "recomputed_tokens",
    "preemptions",
    "swaps",
    "compressions",
    "status",
    "reason",
    "message",
)


def conservation(run: Run) -> None:
    """Law 1, read off the journal alone: every block is given to who may have it and comes back;
    all free at the end.

    (The audit counts the pool itself, at every step.)
    """
    owners: Counter[int] = Counter()
    tables: dict[int, list[int]] = {}
    pending: dict[int, list[int]] = {}  # compression targets on their way
    num_blocks = run.case.limits.num_blocks
    for row, blocks in run.with_blocks():
        _, kind, number, _, _ = row
        table = tables.setdefault(number, [])
        if kind in (EventKind.TOOK, EventKind.GREW, EventKind.SWAP_IN):
            assert not any(owners[block] for block in blocks), (
                f"{number} is given {blocks}, which others own: {row}"
            )
            owners.update(blocks)
            table += blocks
        elif kind == EventKind.HIT:
            owners.update(blocks)
            table += blocks
        elif kind == EventKind.COMPRESSING:
            fresh = [block for block in blocks if block not in table]
            assert not any(owners[block] for block in fresh), (
                f"{number} compresses into {fresh}, which others own"
            )
            owners.update(fresh)
            pending[number] = fresh
            table += fresh
        elif kind in (EventKind.FREED, EventKind.CACHED, EventKind.LEFT):
            for block in blocks:
                assert block in table, f"{number} gives up block {block} that it does not hold"
                table.remove(block)
                owners[block] -= 1
                assert (owners[block] > 0) == (kind == EventKind.LEFT), (
                    f"block {block}: {EventKind(kind).name}, {owners[block]} own"
                )
        used = sum(1 for count in owners.values() if count)
        assert used <= num_blocks, f"{used} of {num_blocks} blocks are used"
    left = {number: table for number, table in tables.items() if table}
    assert not left, f"never given back: {left}"
    pool, num_null = run.scheduler.state.pool, run.scheduler.state.num_null
    assert pool.num_free == num_blocks - num_null, (
        f"{num_blocks - num_null - pool.num_free} blocks are not free at the end"
    )


def one_terminal_event(run: Run) -> None:
    """Law 2."""
    ends = Counter(row[2] for row in run.of(*TERMINAL))
    arrived = [row[2] for row in run.of(EventKind.ARRIVED)]
    assert len(set(arrived)) == len(arrived) == len(run.requests)
    for request in run.requests:
        assert ends[request.number] == 1, f"{request.id} has {ends[request.number]} terminal events"
        assert request.status is not Status.LIVE
    for _, kind, number, _, _ in run.of(*TERMINAL):
        request = next(one for one in run.requests if one.number == number)
        assert request.status is TERMINAL[EventKind(kind)], (
            f"{request.id}: {request.status.name} after {EventKind(kind).name}"
        )
    assert not list(run.scheduler.live()), "somebody lives on"
    told = [request.number for request in run.scheduler.take_finished()]
    assert sorted(told) == sorted(request.number for request in run.requests), (
        "not everyone's end was told once"
    )


def liveness(run: Run) -> None:
    """Law 3, for runs without aborts and failures: whoever was not refused finishes, with every
    token asked for.
    """
    for request in run.requests:
        assert request.status in (Status.FINISHED, Status.REFUSED), (
            f"{request.id} ended {request.status.name}"
        )
        if request.status is Status.FINISHED:
            assert request.generated == request.target_tokens


def refused_at_the_door(run: Run) -> None:
    """Law 4: who can never fit is refused on arrival, with need and capacity, and nobody else for
    that reason.
    """
    limits, state = run.case.limits, run.scheduler.state
    arrivals = {row[2]: place for place, row in enumerate(run.rows) if row[1] == EventKind.ARRIVED}
    for request in run.requests:
        refused = run.rows[arrivals[request.number] + 1 :][:1]
        at_once = bool(refused) and refused[0][1:3] == (EventKind.REFUSED, request.number)
        assert at_once == (request.status is Status.REFUSED), (
            f"{request.id}: refused late, or without an event"
        )
        if (
            request.reason == Reason.NEVER_FITS and not run.case.changes
        ):  # `state` is that of the policy refused under
            whole = -(
                -max(request.prompt_tokens, request.prompt_tokens + request.target_tokens - 1)
                // limits.block_size
            )
            prompt = -(-request.prompt_tokens // limits.block_size)
            need = whole if state.floor is None else max(prompt, min(whole, state.floor))
            usable = limits.num_blocks - state.num_null
            assert need > usable
            assert f"{need} blocks" in request.message, request.message
            assert str(usable) in request.message, request.message


def bounded_preemptions(run: Run) -> None:
    """Law 5: a request gives way at most once for every block or compression that another gets, and
    once a token.

    Somebody gives way only to a request that lacks room now, and nobody is admitted while it waits
    for what was given up: each preemption of a request is followed by a block (or a compression) of
    another one, or the request was itself the one that lacked room. In the latter case it comes
    back only when its whole sequence fits, and then has a token more before it can lack room again.
    An end of the needy one before it gets its block is the one exception.
    """
    took = Counter(row[2] for row in run.of(EventKind.GREW, EventKind.COMPRESSING))
    given = Counter(row[2] for row in run.of(EventKind.PREEMPTED))
    for request in run.requests:
        others = sum(took.values()) - took[request.number] + len(run.requests)
        bound = others + request.generated
        assert request.preemptions <= bound, (
            f"{request.id} was preempted {request.preemptions} times, bound {bound}"
        )
        assert given[request.number] == request.preemptions, (
            f"{request.id}: {given[request.number]} preemptions seen"
        )


def nobody_gives_way_for_nothing(run: Run) -> None:
    """Law 5: in a step where requests are preempted to be recomputed, another gets room, or it was
    the needy one.
    """
    size = run.case.limits.block_size
    steps: dict[int, list[tuple[int, ...]]] = {}
    for row in run.rows:
        steps.setdefault(row[0], []).append(row)
    for step, rows in steps.items():
        victims = {row[2]: row[3] for row in rows if row[1] == EventKind.PREEMPTED}
        swapped = any(row[1] == EventKind.SWAP_OUT for row in rows)
        if not victims or swapped:
            continue
        goes_on = {
            row[2]
            for row in rows
            if row[1] in (EventKind.GREW, EventKind.TOOK, EventKind.COMPRESSING, EventKind.RESUMED)
        } - set(victims)
        needy = any(computed % size == 0 for computed in victims.values())
        assert goes_on or needy, (
            f"step {step}: {sorted(victims)} gave way and nobody got anything: {rows}"
        )


def no_admission_with_preemption(run: Run) -> None:
    """Law 5: nobody is admitted in a step that preempted, unless nothing else could run."""
    preempting = {row[0] for row in run.of(EventKind.PREEMPTED)}
    for row in run.of(EventKind.ADMITTED, EventKind.SWAP_IN):
        if row[0] in preempting:
            decoded = run.decodes.get(row[0], 0)
            assert not decoded, f"step {row[0]} preempts, admits {row[2]} and decodes {decoded}"


def recomputed_counted(run: Run) -> None:
    """Law 5: tokens computed again are those below the highest position computed before."""
    for request in run.requests:
        seen = run.recomputed.get(request.number, 0)
        assert request.recomputed_tokens == seen, (
            f"{request.id}: {request.recomputed_tokens} booked, {seen} seen"
        )


def order_kept(run: Run) -> None:
    """Law 5: at every admission, nobody stands before the admitted one but who was passed over
    within the bounds.

    Checked for first come, one line for all, without skip-ahead: admissions go by submission among
    those waiting.
    """
    order = run.case.policy.order
    if not isinstance(order, FirstCome) or order.lookahead or run.case.changes:
        return
    waiting: set[int] = set()
    swapped: set[int] = set()
    for _, kind, number, _, _ in run.rows:
        if kind == EventKind.ARRIVED:
            waiting.add(number)
        elif kind == EventKind.PREEMPTED:
            swapped.discard(number)
            waiting.add(number)
        elif kind == EventKind.SWAP_OUT:
            waiting.discard(number)  # on its way; it joins the line when the copy has finished
            swapped.add(number)
        elif kind in (EventKind.FREED, EventKind.CACHED, EventKind.LEFT) and number in swapped:
            swapped.discard(number)
            waiting.add(number)
        elif kind in (*TERMINAL,):
            waiting.discard(number)
            swapped.discard(number)
        elif kind in (EventKind.ADMITTED, EventKind.SWAP_IN):
            assert number == min(waiting), f"{number} is admitted before {min(waiting)}"
            waiting.discard(number)


def time_monotone(run: Run) -> None:
    """Law 6: times of a run, and of every request, never go backwards; equal arrivals keep their
    order.
    """
    assert all(one <= other for one, other in pairwise(run.stepped_ns)), (
        "a plan was asked for before the last"
    )
    assert [request.number for request in run.requests] == sorted(
        request.number for request in run.requests
    )
    steps = [row[0] for row in run.rows]
    assert all(one <= other for one, other in pairwise(steps)), (
        "a row of an earlier step comes after a later one"
    )
    for request in run.requests:
        times = [
            request.arrival_ns,
            request.first_admitted_ns,
            request.first_token_ns,
            request.finish_ns,
        ]
        known = [time for time in times if time >= 0]
        assert known == sorted(known), f"{request.id}: {times}"


def times_add_up(run: Run) -> None:
    """Law 7: the phases' times add up to end to end, exactly; gaps add up; the first token is
    stamped once.
    """
    for request in run.requests:
        if request.status is Status.REFUSED:
            continue
        end_to_end = request.finish_ns - request.arrival_ns
        assert sum(request.phase_ns) == end_to_end, (
            f"{request.id}: {request.phase_ns} of {end_to_end} ns"
        )
        assert all(time >= 0 for time in request.phase_ns), f"{request.id}: {request.phase_ns}"
        assert not request.phase_ns[Phase.DONE]
        tokens = run.token_ns.get(request.number, [])
        first = tokens[0] if tokens else -1
        assert request.first_token_ns == first, (
            f"{request.id}: first token at {first}, stamped {request.first_token_ns}"
        )
        assert len(tokens) == request.generated, (
            f"{request.id}: {len(tokens)} tokens seen, {request.generated} counted"
        )
        if request.status is Status.FINISHED and tokens:
            gaps = sum(after - before for before, after in pairwise(tokens))
            assert gaps == request.finish_ns - request.first_token_ns


def same_decisions(one: Run, other: Run) -> None:
    """Law 8: equal digests, rows, blocks, causes and accounts."""
    for mine, yours in zip(one.rows, other.rows, strict=False):
        assert mine == yours, f"{mine} differs from {yours}"
    assert one.rows == other.rows, f"{len(one.rows)} rows differ from {len(other.rows)}"
    assert one.blocks == other.blocks, "the blocks differ"
    assert one.digest == other.digest, "the digests differ"
    for mine, yours in zip(one.causes, other.causes, strict=False):
        assert mine == yours, f"cause {mine} differs from {yours}"
    assert len(one.causes) == len(other.causes), "the causes differ"
    for mine_, yours_ in zip(one.requests, other.requests, strict=True):
        for name in ACCOUNT:
            left, right = getattr(mine_, name), getattr(yours_, name)
            assert left == right, f"{mine_.id}.{name}: {left} differs from {right}"
