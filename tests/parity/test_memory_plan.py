"""Simulator and engine plan the same pool, and the engine allocates what the plan says."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.engine_cases import SMALL, mixed, tiny
from tests.parity.parity_cases import in_simulation, on_engine
from zlab.engine import engine as build
from zlab.engine.engine import Engine, EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.kernels.triton_decode import reserve_decode_workspace
from zlab.engine.kernels.workspace import CompressionShape, CompressionWorkspace
from zlab.engine.kv_cache import Reserved
from zlab.engine.model.spec import find_row
from zlab.policies.spec import load_policy
from zlab.sim.memory import (
    MemorySettings,
    attention_workspace_bytes,
    history_block_bytes,
    plan_memory,
    query_slot_bytes,
    workspace_blocks,
    workspace_bytes,
)
from zlab.sim.replay import Scenario
from zlab.sim.specs import GIB, GPUS, MODELS

H200_TOTAL = 150_109_880_320  # as its driver says; the row of `GPUS` has 0.8 MB less
POLICIES = (
    "full-kv",
    "full-kv:comes_back=swap",
    "hybrid",
    "hybrid:budget.tokens=256",
    "hybrid:slots=none,scorer=recent",
    "hybrid:num_slots=56,window=8",
    "constrained",
    "hybrid-adaptive",
    "nano-vllm",
    "zipage",
)


def engine_pool(
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    *,
    others_bytes: int = 0,
    name: str = "NVIDIA H200",
    **settings: Any,
) -> tuple[int, int]:
    """Blocks and query slots of an engine for Qwen3-8B on a GPU that is not here."""
    config = find_row("qwen3-8b")
    model = SimpleNamespace(config=config, part=config, weight_bytes=config.weight_bytes)
    loaded: Any = SimpleNamespace(config=config, model=model)
    free = H200_TOTAL - config.weight_bytes - 705_000_000 - others_bytes  # CUDA's context: measured
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, H200_TOTAL))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    asked = EngineSettings("qwen3-8b", policies[0], policies[1:], device="cuda", **settings)
    chosen = [load_policy(policy) for policy in policies]
    limits = build._limits(asked, loaded, chosen, torch.bfloat16, torch.device("cuda"))
    return limits.num_blocks, Reserved.of(chosen, limits).num_slots


@pytest.mark.parametrize("policy", POLICIES)
def test_simulator_and_engine_have_the_same_pool(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_blocks = 500 if "swap" in policy else None
    simulated = Scenario(policy, "h200", "qwen3-8b", host_blocks=host_blocks).set_up()
    num_blocks, num_slots = engine_pool(monkeypatch, (policy,), host_blocks=host_blocks or 0)
    assert num_blocks == simulated.limits.num_blocks
    if policy != "zipage":  # it limits the requests of a step, not those that have blocks
        assert num_slots <= simulated.limits.max_running


def test_both_leave_room_for_the_policies_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Scenario("full-kv", changes=("100:hybrid", "200:constrained:window=32")).set_up()
    num_blocks, _ = engine_pool(monkeypatch, ("full-kv", "hybrid", "constrained:window=32"))
    assert num_blocks == simulated.limits.num_blocks < Scenario("hybrid").set_up().limits.num_blocks


def test_a_small_budget_reserves_no_more_slots_than_requests_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_blocks, num_slots = engine_pool(monkeypatch, ("hybrid:budget.tokens=256",))
    assert (num_blocks, num_slots) == (2974, 256)  # of 1,487 budgets that the pool holds


def test_memory_that_others_take_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = engine_pool(monkeypatch, ("full-kv",))
    beside, _ = engine_pool(monkeypatch, ("full-kv",), others_bytes=60 * GIB)
    a_block = 256 * MODELS["qwen3-8b"].kv_bytes_per_token
    assert 0.85 * 60 * GIB < (alone - beside) * a_block < 60 * GIB
    unknown, _ = engine_pool(monkeypatch, ("full-kv",), name="Another GPU of that size")
    assert abs(unknown - alone) <= 1
    with pytest.raises(EngineError, match=r"does not fit on h200: 0\.9 of"):
        engine_pool(monkeypatch, ("full-kv",), others_bytes=122 * GIB)


def test_the_engine_allocates_what_the_plan_says() -> None:
    policy = "hybrid:tokens=40,window=4"
    settings = replace(SMALL, policy=policy, num_blocks=40, max_running=5, dtype="float32")
    engine = Engine.create(settings, tiny())
    spec = replace(engine.loaded.model.part, dtype_bytes=4)
    cache, limits = engine.cache, engine.limits
    slots = cache.window_queries.shape[1]
    assert slots == 5 < engine.scheduler.state.slots.num_slots
    assert cache.window_queries.nbytes == slots * query_slot_bytes(spec, 4)
    assert cache.k.nbytes + cache.v.nbytes == 40 * limits.block_size * spec.kv_bytes_per_token
    assert cache.history.nbytes == 40 * history_block_bytes(spec, limits.block_size)
    splits = reserve_decode_workspace(
        max_length=limits.max_model_len,
        max_requests=6,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        device=torch.device("cpu"),
    )
    allocated = splits.partial_output.nbytes + splits.partial_normaliser.nbytes
    assert allocated == attention_workspace_bytes(spec, limits.max_model_len, 5)


@pytest.mark.parametrize(("block_size", "window"), [(16, 4), (64, 16), (256, 8)])
def test_a_compression_workspace_takes_what_the_plan_says(block_size: int, window: int) -> None:
    spec = replace(MODELS["smollm2-135m"], num_layers=2)
    settings = MemorySettings(block_size=block_size, budget_blocks=5, num_slots=3, window=window)
    workspace = CompressionWorkspace(
        CompressionShape(2, 3, 3, window, block_size),
        capacity_blocks=workspace_blocks(5, 2000, block_size, settings.concurrent_compressions),
        max_requests=settings.concurrent_compressions,
        device=torch.device("cpu"),
    )
    tables = workspace.batch_storage.nbytes
    assert workspace.num_bytes - tables == workspace_bytes(spec, settings, 2000)
    assert tables < 10_000


def test_decisions_are_equal_where_slots_are_capped() -> None:
    # 8 budgets fit in the pool; at most 4 requests run.
    policy = "hybrid:tokens=40,window=4"
    of = on_engine(policy, mixed(20, seed=3, longest=110), num_blocks=30, max_running=4)
    assert of.run.summary["compressions"] > 0
    simulated = in_simulation(policy, of)
    assert of.run.summary["digest"] == simulated.summary["digest"]
    slots = of.run.events.filter(of.run.events["kind"].to_numpy() == 9)["value"].to_numpy()
    assert slots.max() < 4


def test_two_engines_have_working_memory_each() -> None:
    gpu, model = GPUS["h200"], MODELS["qwen3-8b"]
    one = plan_memory(gpu, model, MemorySettings())
    two = plan_memory(gpu, model, MemorySettings(num_engines=2))
    assert two.weight_bytes == one.weight_bytes
    for term in ("activation_bytes", "reserve_bytes", "attention_workspace_bytes"):
        assert getattr(two, term) == 2 * getattr(one, term)
