"""Memory of swaps: how much host and device give, and what is said when they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import build, host_rows, swapping
from engine.build import EngineSettings, build_engine
from engine.cache import CacheShape
from engine.errors import EngineError
from engine.host_pool import HostPool
from engine.swapping import HostSwap
from policies.spec import load_policy
from tests.engine.engine_cases import SMALL, tiny
from tests.engine.swap_cases import SHAPE, filled

torch.set_num_threads(1)


def test_memory_that_the_host_has_not_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = filled("cpu")
    a_block, slots = SHAPE.block_bytes(torch.float32), 5 * SHAPE.slot_bytes(torch.float32)
    wanted = 10**12 * a_block + slots
    with pytest.raises(EngineError, match=f"host_blocks {10**12:,} take {wanted:,} bytes of host memory, and there "):
        HostSwap(cache, 10**12)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(swapping, "CGROUP_LIMIT", limit)
    for text, refused in ((f"{8 * a_block + slots}\n", True), (f"{9 * a_block + slots}\n", False), ("max\n", False)):
        limit.write_text(text)
        if refused:
            with pytest.raises(EngineError, match=f"and there are {8 * a_block + slots:,}"):
                HostSwap(cache, 9)
        else:
            HostSwap(cache, 9)

    def refuse(num_places: int, place_bytes: int, pinned: bool) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(host_rows, "HostPool", refuse)
    with pytest.raises(EngineError, match=f"host_blocks 9 take {9 * a_block + slots:,} bytes .*cannot be had: no more"):
        HostSwap(cache, 9)


def test_a_pool_that_torch_cannot_make() -> None:
    with pytest.raises(MemoryError, match="no 4,611,686,018,427,387,904 bytes more"):
        HostPool(1, 1 << 62, pinned=False)


def test_the_stages_keep_to_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen = CacheShape(36, 2000, 256, 8, 32, 128, num_slots=0, window=16)
    a_block = qwen.block_bytes(torch.bfloat16)
    assert HostSwap.device_bytes(qwen, torch.bfloat16, 1000) == 27 * a_block < swapping.STAGING_BYTES
    assert HostSwap.device_bytes(qwen, torch.bfloat16, 4) == 9 * a_block
    assert HostSwap.device_bytes(qwen, torch.bfloat16, 0) == 0
    made: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*shape: int, **more: Any) -> torch.Tensor:
        found = empty(*shape, **more)
        made.extend([found] if "device" in more else [])
        return found

    monkeypatch.setattr(torch, "empty", noted)
    for shape in (SHAPE, replace(SHAPE, num_slots=0)):
        cache = filled("cpu", shape=shape)
        made.clear()
        HostSwap(cache, 60)
        assert sum(part.nbytes for part in made) == HostSwap.device_bytes(shape, torch.float32, 60)


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
        build_engine(replace(SMALL, policy="full-kv:comes_back=swap", host_blocks=10**12), tiny())


def test_a_card_has_room_for_blocks_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is set aside before the pool is sized, for every engine on the card."""
    memory = 6 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory, memory))
    monkeypatch.setattr(build, "find_device", lambda name: torch.device("cuda"))
    settings = EngineSettings("tiny", "hybrid", block_size=16, max_model_len=400, dtype="float32")
    for num_engines in (1, 2):
        found = [
            build.pool_blocks(replace(settings, host_blocks=host_blocks), tiny(), num_engines)
            for host_blocks in (0, 900)
        ]
        policies = [load_policy("hybrid")]
        limits = build._limits(settings, tiny(), policies, torch.float32, torch.device("cpu"))
        shape = build._shape(tiny(), policies, limits, 1)
        staged_bytes = num_engines * HostSwap.device_bytes(shape, torch.float32, 900)
        a_block = shape.block_bytes(torch.float32)
        slot_share = 1 + shape.slot_bytes(torch.float32) / a_block  # fewer blocks have no more slots
        lacking = found[0] - found[1]
        assert staged_bytes / a_block / slot_share - 1 <= lacking <= staged_bytes / a_block + 1
