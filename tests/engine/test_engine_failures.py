"""What goes wrong or is called off on the way: contained, reported, and nothing is left behind."""

from typing import Any

import pytest

from policies.core.events import Kind
from policies.core.request import Phase, Status
from tests.engine.engine_cases import Watched, mixed, play, prompt, request, watched

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
    while not run.count(Kind.COMPRESSED):
        run.step()
    run.engine.compression.inject_failure = "out of workspace"
    run.run()
    run.assert_empty()
    failed = {id for id, sequence in run.sequences.items() if sequence.request.status is Status.FAILED}
    assert 0 < len(failed) < 6
    for id in failed:
        assert run.sequences[id].request.message == "compression failed: out of workspace"
        assert run.sequences[id].closed
    unharmed = play(requests, f"{HYBRID},join={join}").tokens()
    for id, tokens in run.tokens().items():
        if id in failed:  # joined at once, it has decoded a token more, from what the compression left
            good = len(tokens) - (join == "blocking")
            assert tokens[:good] == unharmed[id][:good]
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
        found = [s for s in run.sequences.values() if s.request.phase is phase and s.request.status is Status.LIVE]
        if found:
            victim = found[-1]
            break
        assert run.step(), f"nobody was ever {phase.name}"
    assert victim is not None, f"nobody was ever {phase.name}"
    run.engine.loop.abort(victim.request.id)
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
    run.engine.loop.abort("a")
    held = run.engine.scheduler.state.pool.num_blocks - run.engine.scheduler.state.pool.num_free
    assert held > len(run.sequences["b"].request.table), "its blocks are held while the copy may still read them"
    run.step()
    assert compression.running == []
    assert run.sequences["a"].request.status is Status.ABORTED
    run.run()
    run.assert_empty()


def test_an_id_can_be_used_again_after_an_abort() -> None:
    run = watched(HYBRID)
    first = run.submit(request("x", prompt(1, 20), 60))
    until(run, "x", Phase.COMPRESSING)
    run.engine.loop.abort("x")
    second = run.submit(request("x", prompt(1, 20), 5))
    run.run()
    assert first.request.status is Status.ABORTED
    assert second.request.status is Status.FINISHED
    assert len(second.output.token_ids) == 5
