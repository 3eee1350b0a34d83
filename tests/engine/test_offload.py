"""Swaps: what comes back is what went out, whatever was written meanwhile; host memory is booked
and used again.

Memory of swaps: how much host and device give, and what is said when they do not.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import (
    POISON,
    SHAPE,
    SMALL,
    filled,
    play,
    prompt,
    request,
    tiny,
    watched,
)
from zlab.engine import engine as build
from zlab.engine import offload as host_rows
from zlab.engine import offload as swapping
from zlab.engine.engine import Engine, EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.kv_cache import CacheShape, KVCache
from zlab.engine.offload import HostPool, HostSwap
from zlab.sim.memory import (
    NUM_STAGES,
    STAGING_BYTES,
    MemorySettings,
    history_block_bytes,
    staging_bytes,
)
from zlab.sim.specs import MODELS, ModelSpec
from zlab.traces.schema import EventKind

torch.set_num_threads(1)
HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=ON_GPU)]
Parts = dict[str, torch.Tensor]


@dataclass
class Stage:
    """A swap as a runner uses it: every step joins first; what has gone out is overwritten as soon
    as that is allowed.

    `away`: what each request had when it went, and whether it had a slot.
    """

    cache: KVCache
    swap: HostSwap
    away: dict[int, Parts] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)

    def step(self) -> None:
        self.swap.join()
        for part in (self.cache.k, self.cache.v, self.cache.history):
            if part.shape[1] > 1:
                part[:, self.freed] = POISON
        self.cache.window_queries[:, self.freed_slots] = POISON
        self.freed.clear()
        self.freed_slots.clear()

    def out(self, number: int, blocks: list[int], slot: int = -1) -> None:
        self.away[number] = self.held(blocks, slot)
        self.swap.out(number, blocks, slot, token=100 + number)
        self.freed += blocks
        self.freed_slots += [slot] if slot >= 0 else []

    def back(self, number: int, blocks: list[int], slot: int = -1) -> None:
        """And, a step later, compare."""
        assert self.swap.back(number, blocks, slot) == 100 + number
        self.step()
        now, before = self.held(blocks, slot), self.away.pop(number)
        for name, part in now.items():
            assert torch.equal(part, before[name]), f"{name} of request {number}"

    def held(self, blocks: list[int], slot: int) -> Parts:
        """Copies, on the host."""
        cache = self.cache
        parts = {"k": cache.k[:, blocks], "v": cache.v[:, blocks]}
        parts |= {"history": cache.history[:, blocks]} if cache.shape.num_slots else {}
        parts |= {"queries": cache.window_queries[:, slot]} if slot >= 0 else {}
        return {name: part.to("cpu", copy=True) for name, part in parts.items()}


def staged(
    device: str = "cpu", *, host_blocks: int = 60, piece_blocks: int = 64, shape: CacheShape = SHAPE
) -> Stage:
    """`piece_blocks`: so many in a piece, unless the host has not that many for all pieces."""
    cache = filled(device, shape=shape)
    a_block = swapping._block_row_bytes(shape, torch.float32)
    return Stage(cache, HostSwap(cache, host_blocks, piece_blocks * (NUM_STAGES + 1) * a_block))


def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks and slots of each gather from now on."""
    found: list[int] = []
    select = torch.index_select

    def counted(
        part: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor
    ) -> torch.Tensor:
        found.append(len(index))
        return select(part, dim, index, out=out)

    monkeypatch.setattr(torch, "index_select", counted)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_several_requests_come_back_as_they_went(device: str) -> None:
    """In another order, to other blocks and slots, with others leaving in the same step."""
    on = staged(device)
    on.out(1, [4, 0, 39, 7], slot=3)
    on.out(2, [5])
    on.step()
    on.out(3, list(range(10, 25)), slot=0)
    on.back(1, [7, 5, 4, 0], slot=1)
    on.out(1, [7, 5, 4, 0], slot=1)
    on.step()
    on.back(3, list(range(39, 24, -1)), slot=4)
    on.back(2, [10])
    on.back(1, [0, 1, 2, 3], slot=2)
    assert not on.away


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads"), [(6, 4, 2), (3, 1, 1), (1, 1, 1), (128, 16, 2)]
)
def test_rows_of_any_size(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int, heads: int
) -> None:
    shape = replace(
        SHAPE, head_dim=head_dim, block_size=block_size, num_kv_heads=heads, num_query_heads=heads
    )
    cache = filled(device, dtype, shape)
    on = Stage(cache, HostSwap(cache, 12))
    on.out(1, [3, 9, 8], slot=2)
    on.step()
    on.back(1, [8, 20, 3], slot=0)


def test_a_cache_that_is_never_compressed_has_no_history_and_no_queries() -> None:
    on = staged(shape=replace(SHAPE, num_slots=0))
    on.out(1, [4, 30])
    on.step()
    on.back(1, [30, 2])
    with pytest.raises(AssertionError, match="query slot 0 of a cache that has none"):
        on.swap.out(2, [1], 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_longer_than_all_stages_goes_in_pieces(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = staged(device, piece_blocks=2)
    seen = pieces(monkeypatch)
    long = list(range(36, 5, -1))
    assert len(long) > 2 * NUM_STAGES
    on.out(1, long, slot=1)
    assert seen == [2] * 45 + [1] * 3 + [1]  # of K, V and history, and the queries
    on.out(2, [39, 38, 37])
    on.step()
    on.back(1, list(range(31)), slot=0)
    on.back(2, [33, 35, 34])


def test_a_copy_is_cut_where_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "COPY_BYTES", 1000)
    on = staged()
    on.out(1, [3, 4, 5])
    on.step()
    on.back(1, [1, 2, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece_blocks", [1, 4])
def test_places_are_used_again(device: str, piece_blocks: int) -> None:
    """Far more goes through than the host holds, with a request always out, and soon in places here
    and there.
    """
    on = staged(device, host_blocks=36, piece_blocks=piece_blocks)
    assert on.swap._blocks is not None
    on.swap._blocks.pool.take(27)  # leaves nine
    on.out(0, [0, 1, 2])
    on.step()
    for number in range(1, 12):
        blocks = [(7 * number + place) % 17 + 3 for place in range(1 + number % 6)]
        on.out(number, blocks, slot=number % 5 if number % 2 else -1)
        on.step()
        if number % 3 == 0:
            on.swap.drop(number)
        else:
            fresh = [block + 17 for block in blocks]
            on.back(number, fresh, slot=(number + 1) % 5 if number % 2 else -1)
    on.back(0, [39, 38, 37])


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_dropped_while_it_is_copied_leaves_its_places_to_the_next(device: str) -> None:
    on = staged(device, host_blocks=4, piece_blocks=1)
    on.out(1, [0, 1, 2, 3], slot=0)
    on.swap.drop(1)
    on.swap.drop(1)
    on.out(2, [4, 5, 6, 7], slot=1)
    on.step()
    on.swap.back(2, [0, 1, 2, 3], 2)
    on.swap.drop(2)  # on its way back: the next one waits until its places have been read
    on.out(3, [8, 9, 10, 11], slot=3)
    on.step()
    on.back(3, [11, 10, 9, 8], slot=3)


def test_back_without_a_slot_frees_the_place_of_its_queries() -> None:
    on = staged()
    for _ in range(3 * SHAPE.num_slots):
        on.out(1, [0], slot=1)
        on.step()
        on.back(1, [0])
        on.cache.window_queries.normal_()
    assert on.swap._queries is not None
    assert on.swap._queries.pool.num_places == SHAPE.num_slots


def test_more_may_be_out_than_there_are_slots() -> None:
    on = staged()
    for number in range(SHAPE.num_slots + 2):
        on.cache.window_queries.normal_()
        on.out(number, [number], slot=1)
        on.step()
    for number in range(SHAPE.num_slots + 2):
        on.back(number, [20 + number], slot=number % 5)


def test_more_than_was_booked_is_not_taken() -> None:
    on = staged(host_blocks=5)
    on.out(1, [0, 1, 2])
    with pytest.raises(AssertionError, match="3 places in host memory are wanted, 2 of 5 are free"):
        on.swap.out(2, [3, 4, 5], -1, 0)
    on.swap.drop(1)
    on.out(3, [3, 4, 5, 6, 7])
    none = HostSwap(on.cache, 0)
    with pytest.raises(AssertionError, match="host_blocks is 0"):
        none.out(1, [0], -1, 0)
    none.drop(1)
    none.join()


def test_setting_it_up_changes_nothing_in_the_cache() -> None:
    cache, untouched = filled("cpu"), filled("cpu")
    HostSwap(cache, 60)
    for name in ("k", "v", "history", "window_queries"):
        assert torch.equal(getattr(cache, name), getattr(untouched, name))


# in an engine


def test_host_memory_is_there_for_another_when_its_owner_ends_on_its_way_out() -> None:
    """The plan that ends the aborted one books its places again, in the same step."""
    asked = [
        request(f"r{place}", prompt(place, length), 40)
        for place, length in enumerate((8, 8, 7, 7, 6, 6, 5, 5))
    ]
    expected = play(asked, "full-kv:prefix=none", num_blocks=200).tokens()
    for host_blocks in (2, 3):
        run = watched("full-kv:comes_back=swap,prefix=none", num_blocks=16, host_blocks=host_blocks)
        for each in asked:
            run.submit(each)
        aborted: list[str] = []
        while run.step():
            for task in list(run.engine.scheduler.state.swapping):
                if task.out and not aborted:
                    run.engine.abort(task.request.id)
                    aborted.append(task.request.id)
        run.run()
        run.assert_empty()
        assert aborted
        assert run.count(EventKind.SWAPPED_IN)
        for id, tokens in run.tokens().items():
            assert tokens == expected[id] or id in aborted, id


# on a card


def hold_up(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Keep a stream busy for a second or more; returns the event of its end."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 31)
        held = torch.cuda.Event()
        held.record()
    return held


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
def test_the_host_waits_for_nothing() -> None:
    """All of it is enqueued behind work that has not even ended, in few stages, and is right
    afterwards.
    """
    on = staged("cuda", host_blocks=40, piece_blocks=1)
    was = on.held(list(range(40)), 0)
    torch.cuda.synchronize()
    busy = hold_up(torch.cuda.current_stream())
    on.swap.out(1, list(range(20)), 0, 7)
    on.swap.out(2, list(range(20, 32)), 1, 8)
    assert not busy.query(), "the copies out waited"
    on.swap.join()
    for part in (on.cache.k, on.cache.v, on.cache.history):
        part[:, :32].fill_(POISON)
    on.cache.window_queries.fill_(POISON)
    on.swap.back(1, list(range(12, 32)), 3)
    on.swap.drop(2)
    on.swap.out(3, list(range(32, 40)), -1, 9)
    assert not busy.query(), "the copies back waited"
    on.swap.join()
    now = on.held(list(range(12, 32)), 3)
    assert torch.equal(now.pop("queries"), was["queries"])
    for name, part in now.items():
        assert torch.equal(part, was[name][:, :20]), name


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
def test_a_step_waits_for_blocks_to_be_read_not_to_arrive() -> None:
    """Where the stages hold all of it; the copies behind them are held up."""
    on = staged("cuda", piece_blocks=2)
    out = on.swap._streams.out
    assert out is not None
    torch.cuda.synchronize()
    held = hold_up(out)
    on.out(1, list(range(2 * NUM_STAGES)))
    on.step()
    torch.cuda.current_stream().synchronize()
    assert not held.query()
    on.back(1, list(range(20, 20 + 2 * NUM_STAGES)))
    assert held.query()


torch.set_num_threads(1)


def test_memory_that_the_host_has_not_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = filled("cpu")
    a_block, slots = SHAPE.block_bytes(torch.float32), 5 * SHAPE.slot_bytes(torch.float32)
    wanted = 10**12 * a_block + slots
    with pytest.raises(
        EngineError,
        match=f"host_blocks {10**12:,} take {wanted:,} bytes of host memory, and there ",
    ):
        HostSwap(cache, 10**12)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(swapping, "CGROUP_LIMIT", limit)
    for text, refused in (
        (f"{8 * a_block + slots}\n", True),
        (f"{9 * a_block + slots}\n", False),
        ("max\n", False),
    ):
        limit.write_text(text)
        if refused:
            with pytest.raises(EngineError, match=f"and there are {8 * a_block + slots:,}"):
                HostSwap(cache, 9)
        else:
            HostSwap(cache, 9)

    def refuse(num_places: int, place_bytes: int, pinned: bool) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(host_rows, "HostPool", refuse)
    with pytest.raises(
        EngineError,
        match=f"host_blocks 9 take {9 * a_block + slots:,} bytes .*cannot be had: no more",
    ):
        HostSwap(cache, 9)


def test_a_pool_that_torch_cannot_make() -> None:
    with pytest.raises(MemoryError, match="no 4,611,686,018,427,387,904 bytes more"):
        HostPool(1, 1 << 62, pinned=False)


def test_the_stages_keep_to_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen = MODELS["qwen3-8b"]
    a_block = 256 * qwen.kv_bytes_per_token
    for host_blocks, num_blocks in ((1000, 27), (4, 9), (0, 0)):
        planned = staging_bytes(qwen, MemorySettings(host_blocks=host_blocks))
        assert planned == num_blocks * a_block <= STAGING_BYTES
    made: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*shape: int, **more: Any) -> torch.Tensor:
        found = empty(*shape, **more)
        made.extend([found] if "device" in more else [])
        return found

    monkeypatch.setattr(torch, "empty", noted)
    spec = ModelSpec(
        "small", SHAPE.num_layers, 8, 8, SHAPE.num_query_heads, SHAPE.num_kv_heads, SHAPE.head_dim,
        8, True, 64, dtype_bytes=4,
    )  # fmt: skip
    for shape in (SHAPE, replace(SHAPE, num_slots=0)):
        cache = filled("cpu", shape=shape)
        made.clear()
        HostSwap(cache, 60)
        settings = MemorySettings(
            block_size=shape.block_size,
            host_blocks=60,
            num_slots=shape.num_slots,
            budget_blocks=2 if shape.num_slots else 0,
            window=shape.window,
        )
        assert sum(part.nbytes for part in made) == staging_bytes(spec, settings)


def test_runs_of_places_end_where_their_memory_does() -> None:
    pool = HostPool(7, 10, pinned=False, chunk_bytes=39)  # three a chunk
    places, readers = pool.take(7)
    assert (places, readers) == ([0, 1, 2, 3, 4, 5, 6], [])
    for number in places:
        [(_, row)] = pool.runs([number])
        row.fill_(number)
    wanted = [5, 6, 0, 1, 3, 4, 2]
    found = list(pool.runs(wanted))
    assert [first for first, _ in found] == [0, 1, 2, 4, 6]
    assert [number for _, rows in found for number in rows[:, 9].tolist()] == wanted
    pool.give_back([4, 2])
    assert pool.take(2) == ([4, 2], [])


def test_an_engine_that_asks_for_too_much_says_so() -> None:
    with pytest.raises(EngineError, match=f"host_blocks {10**12:,} take "):
        Engine.create(replace(SMALL, policy="full-kv:comes_back=swap", host_blocks=10**12), tiny())


def test_a_card_has_room_for_blocks_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is set aside before the pool is sized, for every engine on the card."""
    memory = 12 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory, memory))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(build, "find_device", lambda name: torch.device("cuda"))
    settings = EngineSettings("tiny", "hybrid", block_size=16, max_model_len=400, dtype="float32")
    spec = replace(tiny().model.part, dtype_bytes=4)
    for num_engines in (1, 2):
        found = [
            build.pool_blocks(replace(settings, host_blocks=host_blocks), tiny(), num_engines)
            for host_blocks in (0, 900)
        ]
        needs = MemorySettings(
            block_size=16, host_blocks=900, num_slots=1, budget_blocks=2, window=16
        )
        a_block = 16 * spec.kv_bytes_per_token + history_block_bytes(spec, 16)
        lacking = (found[0] - found[1]) * a_block
        assert abs(lacking - num_engines * staging_bytes(spec, needs)) <= a_block
