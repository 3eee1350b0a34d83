"""Another policy in a running engine: outputs, memory set aside, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import GREEDY, Watched, mixed, play, prompt, request, tiny, watched
from zlab.engine import engine as build
from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.kv_cache import CacheShape, Reserved
from zlab.policies.core.plan import ConfigError
from zlab.policies.spec import PolicyError, load_policy
from zlab.sim.memory import MemorySettings
from zlab.traces.schema import EventKind, Phase, Status
from zlab.traces.workload import TraceRequest

FULL, HYBRID, CONSTRAINED = "full-kv", "hybrid:tokens=40,window=4", "constrained:tokens=24,window=6"
SLOTLESS = "hybrid:tokens=40,window=4,slots=none,scorer=recent"
ROUND = {20: HYBRID, 40: CONSTRAINED, 60: FULL, 80: HYBRID}
REQUESTS = mixed(14, seed=7, longest=90)


def play_changing(
    requests: Sequence[TraceRequest], changes: Mapping[int, str], start: str = FULL, **settings: Any
) -> Watched:
    """All requests at once; before the steps named, another policy."""
    run = watched(
        start, may_become=tuple(changes.values()), num_blocks=20, host_blocks=100, **settings
    )
    for asked in requests:
        run.submit(asked)
    left = dict(changes)
    for _ in range(5000):
        if (spec := left.pop(run.engine.scheduler.next_step, None)) is not None:
            run.engine.replace_policy(load_policy(spec))
        if not run.step() and not run.engine.scheduler.state.requests:
            break
    run.engine.drain()
    assert not left, "the run ended before every policy had its turn"
    run.assert_empty()
    return run


def test_there_and_back_again_with_everything_going_on() -> None:
    run = play_changing(REQUESTS, ROUND)
    assert [r.request.status for r in run.sequences.values()] == [Status.FINISHED] * len(REQUESTS)
    assert {id: len(tokens) for id, tokens in run.tokens().items()} == {
        r.id: r.output_tokens for r in REQUESTS
    }
    assert run.count(EventKind.POLICY) == len(ROUND)
    assert run.count(EventKind.COMPRESSED) > 5
    assert run.count(EventKind.PREEMPTED) > 0
    assert run.engine.policy.name == HYBRID


def test_the_same_changes_at_the_same_steps_give_the_same_tokens() -> None:
    one, other = play_changing(REQUESTS, ROUND), play_changing(REQUESTS, ROUND, overlap=False)
    assert one.tokens() == other.tokens()
    assert one.engine.scheduler.digest() == other.engine.scheduler.digest()


def test_outputs_are_those_of_a_quiet_run_where_nothing_is_compressed() -> None:
    """Budgets above every request: slots come and go, requests give way, and no token is another
    one.
    """
    roomy = {
        10: "hybrid:tokens=152,window=4",
        20: "constrained:tokens=72,window=6",
        30: FULL,
        40: "nano-vllm",
    }
    short = mixed(16, seed=7, longest=40)
    run = play_changing(short, roomy)
    assert run.count(EventKind.COMPRESSED) == 0
    assert run.count(EventKind.PREEMPTED) > 0
    assert run.tokens() == play(short, FULL).tokens()


def test_compressed_outputs_do_not_depend_on_what_was_set_aside() -> None:
    """Slots keep the queries of the longest window, the workspace is that of the largest budget:
    the same numbers.
    """
    plain = play(REQUESTS, HYBRID, num_blocks=20)
    roomy = play(
        REQUESTS, HYBRID, num_blocks=20, may_become=("zipage:tokens=24,window=8", CONSTRAINED, FULL)
    )
    assert roomy.engine.cache.shape.window == 8 > plain.engine.cache.shape.window
    assert plain.tokens() == roomy.tokens()
    assert plain.count(EventKind.COMPRESSED) == roomy.count(EventKind.COMPRESSED) > 5


def test_a_scorer_that_remembers_takes_over_from_one_that_does_not() -> None:
    """What another request left in the blocks is no history: poisoned, it would show in every
    score.
    """
    changes = {
        60: f"{HYBRID},scorer=attention",
        90: f"{HYBRID},scorer=attention+global",
        110: f"{HYBRID},scorer=recent",
    }
    one, other = (
        play_changing(REQUESTS, changes, HYBRID),
        play_changing(REQUESTS, changes, HYBRID, poison=False),
    )
    assert one.count(EventKind.COMPRESSED) > 5
    assert one.tokens() == other.tokens()


def test_a_request_compressed_without_queries_goes_on_without_them_under_any_policy() -> None:
    """No slot holds the queries of its tokens; what another request left in a slot is poison."""
    changes = {60: HYBRID, 75: FULL, 90: SLOTLESS, 105: f"{CONSTRAINED},scorer=attention"}
    one, other = (
        play_changing(REQUESTS, changes, SLOTLESS),
        play_changing(REQUESTS, changes, SLOTLESS, poison=False),
    )
    slotless = one.engine.scheduler.state.slots.slotless
    assert not slotless
    assert [r.request.status for r in one.sequences.values()] == [Status.FINISHED] * len(REQUESTS)
    assert one.count(EventKind.COMPRESSED) > 5
    assert one.tokens() == other.tokens()


def test_an_engine_without_slots_says_what_a_policy_with_slots_lacks() -> None:
    run = watched(SLOTLESS, num_blocks=20)
    assert run.engine.cache.shape.num_slots == 0
    assert not run.engine.cache.shape.has_history
    with pytest.raises(
        EngineError, match=r"3 query slots, 0 are reserved; a score history, none is reserved"
    ):
        run.engine.replace_policy(load_policy(HYBRID))
    with pytest.raises(EngineError, match=r"6 tokens always kept, 4 are reserved"):
        run.engine.replace_policy(load_policy(f"{SLOTLESS},window=6"))
    with pytest.raises(EngineError, match=r"4 tokens always kept, 0 are reserved"):
        watched(FULL, num_blocks=20).engine.replace_policy(load_policy(SLOTLESS))


def test_a_policy_that_needs_more_than_was_set_aside_is_refused_with_the_numbers() -> None:
    run = watched(FULL, num_blocks=20)
    run.submit(REQUESTS[0])
    run.step()
    loop, before = run.engine, run.engine.scheduler.digest()
    with pytest.raises(EngineError, match=r"3 query slots, 0 are reserved.*may_become"):
        loop.replace_policy(load_policy(HYBRID))
    with pytest.raises(EngineError, match="20 requests with blocks at once, 16 are reserved"):
        loop.replace_policy(load_policy("nano-vllm"))
    with pytest.raises(ConfigError, match="does not fit in a pool of 20"):
        loop.replace_policy(load_policy("hybrid:tokens=400,window=4"))
    assert run.engine.scheduler.digest() == before
    assert run.engine.policy.name == FULL
    assert not loop.policy_changes
    run.run()
    run.assert_empty()


def test_windows_and_scorers_are_checked_before_anything_changes() -> None:
    run = watched(HYBRID, num_blocks=20)
    with pytest.raises(EngineError, match="8 queries a slot, 4 are reserved"):
        run.engine.replace_policy(load_policy("hybrid:tokens=40,window=8"))
    with pytest.raises(PolicyError, match="did you mean 'attention'"):
        load_policy(f"{HYBRID},scorer=atention")
    with pytest.raises(ConfigError, match="sink"):
        run.engine.replace_policy(load_policy(f"{HYBRID},sink=60"))
    assert run.engine.policy.name == HYBRID
    run.engine.replace_policy(load_policy("full-kv:window=8"))  # nobody needs its window
    assert run.engine.policy.name == "full-kv:window=8"
    assert [change.policy.name for change in run.engine.policy_changes] == ["full-kv:window=8"]


def test_what_cannot_work_is_refused_when_the_engine_starts() -> None:
    with pytest.raises(ConfigError, match="does not fit in a pool of 20"):
        watched(FULL, num_blocks=20, may_become=("hybrid:tokens=4000,window=4",))


def test_requests_that_end_with_the_change_are_closed() -> None:
    """A prompt of the whole pool, about to be compressed: without a budget it has all the tokens
    there can be.
    """
    run = watched(
        "hybrid:tokens=16,window=4", num_blocks=4, may_become=(FULL,), max_batched_tokens=64
    )
    whole = run.submit(request("A", prompt(3, 30), 20))
    while (
        whole.request.phase is Phase.QUEUED
        or run.engine.scheduler.state.decoding.tokens(whole.request)[0] < 33
    ):
        run.step()
    run.engine.replace_policy(load_policy(FULL))
    assert whole.closed
    assert (whole.request.status, len(whole.output.token_ids)) == (Status.FINISHED, 3)
    assert "capped at 3 of 20 tokens by the pool of 4 blocks" in whole.request.message
    run.assert_empty()


def test_a_card_has_room_for_the_slots_of_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slots, history and workspace of a later policy take is not there for blocks."""
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 6 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    names = {
        "full-kv": (),
        "hybrid": (),
        "full-kv, hybrid": ("hybrid",),
        "full-kv, small": ("hybrid:tokens=16",),
    }
    blocks = {}
    for name, others in names.items():
        settings = EngineSettings(
            "tiny", name.split(",")[0], others, block_size=16, max_model_len=400
        )
        policies = [load_policy(str(policy)) for policy in (settings.policy, *others)]
        limits = build._limits(settings, tiny(), policies, torch.float32, card)
        reserved = Reserved.of(policies, limits)
        shape = CacheShape.of(
            tiny().model.part,
            num_blocks=limits.num_blocks,
            block_size=16,
            num_slots=reserved.num_slots,
            window=reserved.window,
        )
        taken = shape.num_slots * shape.slot_bytes(
            torch.float32
        ) + shape.num_blocks * shape.block_bytes(torch.float32)
        assert taken < 0.9 * (6 << 30) - MemorySettings().reserve_bytes
        assert reserved.num_slots in (0, limits.max_running)
        blocks[name] = limits.num_blocks
    assert blocks["full-kv"] > blocks["full-kv, hybrid"] == blocks["hybrid"]
    assert blocks["full-kv"] > blocks["full-kv, small"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_a_change_allocates_nothing_and_captures_nothing() -> None:
    """With graphs and without, the same decisions as on the CPU; what was set aside at the start is
    all there is.
    """
    digests = set()
    for device, graphs in (("cuda", True), ("cuda", False), ("cpu", None)):
        settings = EngineSettings(
            "dummy:tiny",
            FULL,
            tuple(ROUND.values()),
            20,
            16,
            max_batched_tokens=64,
            max_running=16,
            max_model_len=400,
            device=device,
            use_graphs=graphs,
        )
        engine = build.Engine.create(settings)
        for asked in REQUESTS:
            engine.submit(asked, list(asked.prompt_ids or ()), GREEDY)
        left = dict(ROUND)
        while engine.scheduler.state.requests:
            if (spec := left.pop(engine.scheduler.next_step, None)) is not None:
                engine.drain()
                held = torch.cuda.memory_allocated() if device == "cuda" else 0
                engine.replace_policy(load_policy(spec))
                assert device == "cpu" or torch.cuda.memory_allocated() <= held
            engine.step()
        engine.drain()
        assert not left
        digests.add(engine.scheduler.digest())
    assert len(digests) == 1
