"""What goes wrong or is called off on the way: contained, reported, and nothing is left behind.

The garbage collector while an engine serves.
"""

import gc
import weakref
from typing import Any

import pytest

from tests.engine.engine_cases import Watched, mixed, play, prompt, request, watched
from zlab.engine.engine import set_aside
from zlab.engine.errors import EngineError
from zlab.engine.llm import finish_reason
from zlab.engine.sampling_params import SamplingParams
from zlab.traces.schema import EventKind, Phase, Status

HYBRID = "hybrid:tokens=24,window=4"


def until(run: Watched, id: str, phase: Phase, most_steps: int = 500) -> None:
    """Step until the request is in that phase at a step boundary."""
    for _ in range(most_steps):
        if run.sequences[id].request.phase is phase:
            return
        run.step()
    raise AssertionError(f"{id} was never {phase.name}")


@pytest.mark.parametrize("join", ["boundary", "blocking", "when_done"])
def test_a_failed_compression_fails_its_requests_alone(join: str) -> None:
    run = watched(f"{HYBRID},join={join}")
    requests = mixed(12)
    for asked in requests:
        run.submit(asked)
    assert run.engine.compression is not None
    while not run.count(EventKind.COMPRESSED):
        run.step()
    run.engine.compression.inject_failure = "out of workspace"
    run.run()
    run.assert_empty()
    failed = {
        id for id, sequence in run.sequences.items() if sequence.request.status is Status.FAILED
    }
    assert 0 < len(failed) < 6
    for id in failed:
        assert run.sequences[id].request.message == "compression failed: out of workspace"
        assert run.sequences[id].closed
    unharmed = play(requests, f"{HYBRID},join={join}").tokens()
    for id, tokens in run.tokens().items():
        if (
            id in failed
            # joined at once, it has decoded a token more, from what the compression left: it is not
            # said
        ):
            assert tokens == unharmed[id][: len(tokens)]
        else:
            assert run.sequences[id].request.status is Status.FINISHED
            assert tokens == unharmed[id]


PHASES: dict[Phase, tuple[str, dict[str, Any]]] = {
    Phase.QUEUED: (HYBRID, {"num_blocks": 16}),
    Phase.PREFILL: (HYBRID, {"max_batched_tokens": 6}),
    Phase.DECODE: (HYBRID, {}),
    Phase.COMPRESSING: (HYBRID, {}),
    Phase.WAITS_FOR_SLOT: ("hybrid:tokens=40,window=7,slotted=true", {"num_blocks": 16}),
    Phase.PREEMPTED: ("full-kv", {"num_blocks": 16}),
    Phase.SWAPPED: ("full-kv:comes_back=swap", {"num_blocks": 16, "host_blocks": 100}),
    Phase.SWAPPING_IN: ("full-kv:comes_back=swap", {"num_blocks": 16, "host_blocks": 100}),
}


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_abort_in_every_phase(phase: Phase) -> None:
    """The others' tokens stay what they are, and all that was held comes back."""
    policy, limits = PHASES[phase]
    requests = mixed(14, seed=2)
    run = watched(policy, **limits)
    for asked in requests:
        run.submit(asked)
    victim = None
    for _ in range(2000):
        found = [
            s
            for s in run.sequences.values()
            if s.request.phase is phase and s.request.status is Status.LIVE
        ]
        if found:
            victim = found[-1]
            break
        assert run.step(), f"nobody was ever {phase.name}"
    assert victim is not None, f"nobody was ever {phase.name}"
    run.engine.abort(victim.request.id)
    run.run()
    run.assert_empty()
    assert victim.request.status is Status.ABORTED
    assert victim.closed
    expected = play(requests, policy.replace(":comes_back=swap", ""), num_blocks=200).tokens()
    for id, sequence in run.sequences.items():
        if sequence is not victim:
            assert sequence.request.status is Status.FINISHED
            assert run.tokens()[id] == expected[id]
    given = victim.output.token_ids
    assert given == expected[victim.request.id][: len(given)]


def test_blocks_of_an_aborted_compression_wait_for_it() -> None:
    """The stream is asked to join it before anybody else may use its blocks."""
    run = watched(HYBRID)
    run.submit(request("a", prompt(1, 20), 60))
    run.submit(request("b", prompt(2, 9), 60))
    until(run, "a", Phase.COMPRESSING)
    compression = run.engine.compression
    assert compression is not None
    assert compression.running == [0]
    run.engine.abort("a")
    held = run.engine.scheduler.state.pool.num_blocks - run.engine.scheduler.state.pool.num_free
    assert held > len(run.sequences["b"].request.table), (
        "its blocks are held while the copy may still read them"
    )
    run.step()
    assert compression.running == []
    assert run.sequences["a"].request.status is Status.ABORTED
    run.run()
    run.assert_empty()


def test_an_id_can_be_used_again_after_an_abort() -> None:
    run = watched(HYBRID)
    first = run.submit(request("x", prompt(1, 20), 60))
    until(run, "x", Phase.COMPRESSING)
    run.engine.abort("x")
    second = run.submit(request("x", prompt(1, 20), 5))
    run.run()
    assert first.request.status is Status.ABORTED
    assert second.request.status is Status.FINISHED
    assert len(second.output.token_ids) == 5


SWAPPING = "full-kv:comes_back=swap,prefix=none"
IN_FLIGHT: dict[str, tuple[str, Phase, dict[str, Any]]] = {
    "compression": (HYBRID, Phase.COMPRESSING, {"num_blocks": 24, "max_running": 2}),
    "compression, waited for": (
        f"{HYBRID},join=when_done",
        Phase.COMPRESSING,
        {"num_blocks": 24, "max_running": 1},
    ),
    "swap out": (SWAPPING, Phase.SWAPPED, {"num_blocks": 16, "max_running": 4, "host_blocks": 12}),
    "swap in": (
        SWAPPING,
        Phase.SWAPPING_IN,
        {"num_blocks": 16, "max_running": 4, "host_blocks": 12},
    ),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("what", IN_FLIGHT)
def test_an_abort_in_flight_at_the_limit_lets_the_next_one_in(what: str, overlap: bool) -> None:
    """Case T01: the plan that ends the aborted request admits another, for which there is no row
    but its own.
    """
    policy, phase, limits = IN_FLIGHT[what]
    requests = [request(f"r{place}", prompt(place, 9 + 3 * (place % 4)), 60) for place in range(8)]
    run = watched(policy, overlap=overlap, **limits)
    for asked in requests:
        run.submit(asked)
    aborted: list[str] = []
    for _ in range(5000):
        scheduler = run.engine.scheduler
        found = [r for r in scheduler.live() if r.in_flight and r.phase is phase and not r.to_abort]
        if found and len(aborted) < 2 and len(scheduler.state.waiting):
            run.engine.abort(found[0].id)
            aborted.append(found[0].id)
        if not run.step() and not scheduler.state.requests:
            break
    run.engine.drain()
    run.assert_empty()
    assert len(aborted) == 2
    expected = play(requests, policy.replace("comes_back=swap,", ""), num_blocks=200).tokens()
    for id, tokens in run.tokens().items():
        wanted = Status.ABORTED if id in aborted else Status.FINISHED
        assert run.sequences[id].request.status is wanted
        assert tokens == expected[id][: len(tokens) if id in aborted else None]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_compression_that_fails_in_the_step_of_the_last_token_is_no_finish(overlap: bool) -> None:
    """Joined at once, the step still gives a token, out of blocks that hold anything: it is not the
    request's last.
    """
    whole = play([request("whole", prompt(1, 20), 40)], "full-kv").tokens()["whole"]
    compressed = {}
    for output in range(11, 17):
        run = watched(f"{HYBRID},join=blocking", overlap=overlap)
        assert run.engine.compression is not None
        run.engine.compression.inject_failure = "out of workspace"
        victim = run.submit(request("victim", prompt(1, 20), output))
        other = run.submit(request("other", prompt(2, 5), 20))
        run.run()
        run.assert_empty()
        tokens = victim.output.token_ids
        assert tokens == whole[: len(tokens)]
        assert other.request.status is Status.FINISHED
        compressed[output] = run.engine.compression.inject_failure is None
        if compressed[output]:
            assert victim.request.status is Status.FAILED
            assert victim.request.message == "compression failed: out of workspace"
            assert finish_reason(victim) == "error"
            assert len(tokens) == 13
        else:
            assert (victim.request.status, len(tokens)) == (Status.FINISHED, output)
    assert compressed == {11: False, 12: False, 13: False, 14: True, 15: True, 16: True}


def test_what_was_there_before_is_set_aside_and_comes_back() -> None:
    before = gc.get_freeze_count()
    with set_aside():
        assert gc.get_freeze_count() > before + 1000
        assert len(gc.get_objects()) < 1000, "what a full pass looks at"
    assert gc.get_freeze_count() == 0


def test_it_comes_back_after_an_error_too() -> None:
    with pytest.raises(KeyError), set_aside():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_garbage_that_is_made_meanwhile_is_collected() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    with set_aside():
        Ring()
        assert gc.collect() > 0


def test_a_closed_engine_has_released_its_memory_and_takes_nothing_more() -> None:
    engine = watched("hybrid:budget.tokens=32,window=4").engine
    sequences = [
        engine.submit(
            request(str(n), prompt(n, 20), 40), prompt(n, 20), SamplingParams(ignore_eos=True)
        )
        for n in range(3)
    ]
    for _ in range(6):
        engine.step()
    runner, cache = weakref.ref(engine.runner), weakref.ref(engine.cache)
    assert engine.scheduler.stats().num_requests == 3
    engine.close()
    engine.close()  # a second call does nothing
    assert [one.request.status for one in sequences] == [Status.ABORTED] * 3
    assert engine.scheduler.stats().num_free_blocks == engine.limits.num_blocks
    del sequences
    gc.collect()
    assert (runner(), cache()) == (None, None)
    closed = "the engine is closed; make another with Engine.create"
    with pytest.raises(EngineError, match=closed):
        engine.step()
    with pytest.raises(EngineError, match=closed):
        engine.submit(
            request("late", prompt(9, 4), 4), prompt(9, 4), SamplingParams(ignore_eos=True)
        )
    with pytest.raises(EngineError, match=closed):
        engine.replace_policy(engine.policy)
