"""From bytes to KV blocks: each term by hand, their sum, and what does not fit."""

import json
from dataclasses import replace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zlab.cli.memory import memory
from zlab.engine.engine import EngineSettings
from zlab.policies.spec import load_policy
from zlab.sim.memory import (
    MemoryPlanError,
    MemorySettings,
    activation_bytes,
    attention_workspace_bytes,
    plan_memory,
    workspace_blocks,
)
from zlab.sim.replay import Scenario, default_limits
from zlab.sim.specs import GIB, GPUS, MODELS, SimError

H200, QWEN3_8B = GPUS["h200"], MODELS["qwen3-8b"]
STEP_TOKENS = 8192
HYBRID = MemorySettings(num_slots=56, budget_blocks=9, max_batched_tokens=STEP_TOKENS)


def test_terms_of_qwen3_8b_on_h200_by_hand() -> None:
    plan = plan_memory(H200, QWEN3_8B, HYBRID)
    assert plan.weight_bytes == 2 * 8_190_735_360
    # Residual and the MLP's input (2 x 4096), gate, up and product (3 x 12288), of 8,192 tokens in
    # bf16.
    assert plan.activation_bytes == 8_192 * (2 * 4096 + 3 * 12_288) * 2
    assert plan.reserve_bytes == 3 * GIB
    # 256 requests and one that pads, each in 40 splits of 1,024 tokens.
    assert plan.attention_workspace_bytes == 257 * 40 * 32 * (128 + 1) * 4
    assert plan.query_slot_bytes == 56 * 36 * 16 * 32 * 128 * 2
    # One request of 40,960 tokens, 161 blocks with one to grow into, is more than 16 of 9 blocks:
    # four 4-byte values per layer and head and token; for each tile, here a block, and each request
    # the maximum and the sum, and for each request the normaliser, of 4 query heads x 16 queries.
    values = 4 * 161 * 256 + 64 * (2 * (161 + 16) + 16)
    assert plan.workspace_bytes == 36 * 8 * values * 4
    assert plan.staging_bytes == 0
    assert plan.block_bytes == 256 * 147_456
    history = 256 * 36 * 8 * 4
    fixed = 16_381_470_720 + 738_197_504 + 3_221_225_472 + 169_743_360 + 264_241_152
    fixed += plan.workspace_bytes
    assert plan.num_blocks == (int(139.80 * GIB * 0.9) - fixed) // (256 * 147_456 + history)
    assert plan.score_cache_bytes == plan.num_blocks * history
    assert plan.num_tokens == 256 * plan.num_blocks


def test_without_slots_nothing_is_kept_for_compression() -> None:
    plan = plan_memory(H200, QWEN3_8B, MemorySettings(max_batched_tokens=STEP_TOKENS))
    assert plan.query_slot_bytes == plan.score_cache_bytes == plan.workspace_bytes == 0
    assert plan.num_blocks > plan_memory(H200, QWEN3_8B, HYBRID).num_blocks


def test_a_scorer_without_queries_needs_no_slots_but_a_workspace() -> None:
    policy = load_policy("hybrid:slots=none,scorer=recent")
    limits = default_limits(H200, QWEN3_8B, policy)
    settings = replace(HYBRID, num_slots=0, max_running=limits.max_running, global_scores=False)
    plan = plan_memory(H200, QWEN3_8B, settings)
    assert plan.query_slot_bytes == plan.score_cache_bytes == 0 < plan.workspace_bytes
    assert plan.workspace_bytes == plan_memory(H200, QWEN3_8B, HYBRID).workspace_bytes
    assert limits.num_blocks == plan.num_blocks


def test_a_scorer_without_history_needs_no_score_cache() -> None:
    assert plan_memory(H200, QWEN3_8B, replace(HYBRID, global_scores=False)).score_cache_bytes == 0


def test_the_workspace_follows_the_batch_once_it_exceeds_the_longest_prompt() -> None:
    assert workspace_blocks(9, 40_960, 256, 16) == 161
    assert workspace_blocks(9, 4000, 256, 16) == 160
    assert workspace_blocks(9, 4000, 256, 8) == 80
    assert workspace_blocks(2, 4000, 256, 1) == 17
    settings = replace(HYBRID, max_model_len=4000, concurrent_compressions=8)
    values = 4 * 80 * 256 + 64 * (2 * (80 + 8) + 8)
    assert plan_memory(H200, QWEN3_8B, settings).workspace_bytes == 36 * 8 * values * 4


def test_logits_are_the_peak_of_a_small_step() -> None:
    # 256 rows: residual and last hidden states, logits in bf16, fp32 logits and probabilities.
    assert activation_bytes(QWEN3_8B, 256, 1000) == 256 * (2 * 4096 * 2 + 151_936 * (2 + 8))


def test_attention_is_the_peak_where_the_mlp_is_narrow() -> None:
    narrow = replace(QWEN3_8B, intermediate_size=64, vocab_size=10)
    assert activation_bytes(narrow, 100, 1) == 100 * (2 * 4096 + 2 * 4096 + 2 * 1024) * 2


@given(
    st.sampled_from(sorted(GPUS)),
    st.sampled_from(sorted(MODELS)),
    st.builds(
        MemorySettings,
        block_size=st.sampled_from([16, 32, 64, 256]),
        utilisation=st.floats(0.05, 1.0),
        max_batched_tokens=st.integers(1, 65_536),
        max_running=st.integers(1, 1024),
        num_slots=st.integers(0, 512),
        budget_blocks=st.integers(2, 64),
        concurrent_compressions=st.integers(1, 64),
    ),
)
def test_the_terms_add_up_to_the_card(gpu: str, model: str, settings: MemorySettings) -> None:
    card = GPUS[gpu]
    try:
        plan = plan_memory(card, MODELS[model], settings)
    except MemoryPlanError:
        smaller = replace(
            settings,
            num_slots=0,
            budget_blocks=0,
            max_batched_tokens=1,
            max_running=1,
            reserve_bytes=0,
            max_model_len=1024,
        )
        least = MODELS[model].weight_bytes + settings.block_size * MODELS[model].kv_bytes_per_token
        if least < 0.99 * settings.utilisation * card.memory_bytes:
            assert plan_memory(card, MODELS[model], smaller).num_blocks >= 1
        return
    assert sum(plan.terms.values()) == card.memory_bytes
    assert all(value >= 0 for value in plan.terms.values())
    assert plan.num_blocks >= 1
    assert plan.unused_bytes < plan.block_bytes


def test_what_does_not_fit_names_every_term() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(GPUS["rtx4090"], MODELS["qwen3-14b"], HYBRID)
    message = str(caught.value)
    assert "qwen3-14b does not fit on rtx4090" in message
    for term in (
        "weights 29,536,614,400",
        "activations",
        "query slots",
        "attention workspace",
        "compression workspace",
        "swap staging",
    ):
        assert term in message
    assert "leaves -" in message
    assert "one KV block of 256 tokens takes 42,270,720" in message


def test_a_pool_of_exactly_one_block_fits_and_one_byte_less_does_not() -> None:
    settings = MemorySettings(utilisation=1.0, max_batched_tokens=1, max_running=1, reserve_bytes=0)
    fixed = QWEN3_8B.weight_bytes + activation_bytes(QWEN3_8B, 1, 1)
    fixed += attention_workspace_bytes(QWEN3_8B, 40_960, 1)
    card = replace(H200, memory_bytes=fixed + 256 * 147_456)
    plan = plan_memory(card, QWEN3_8B, settings)
    assert (plan.num_blocks, plan.unused_bytes) == (1, 0)
    with pytest.raises(MemoryPlanError, match="leaves 37,748,735"):
        plan_memory(replace(card, memory_bytes=card.memory_bytes - 1), QWEN3_8B, settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"utilisation": 1.1}, "memory utilisation must be above 0 and at most 1, got 1.1"),
        (
            {"utilisation": float("nan")},
            "memory utilisation must be above 0 and at most 1, got nan",
        ),
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"reserve_bytes": -1}, "reserve_bytes must be at least 0, got -1"),
        (
            {"num_slots": 4, "budget_blocks": 1},
            "budget_blocks must be at least 2 .* got 1 with num_slots 4",
        ),
        ({"num_slots": 4, "budget_blocks": 9, "window": 257}, "got window 257 and block_size 256"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimError, match=message):
        MemorySettings(**changes)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(
        SimError, match="max_model_len 50000 is beyond the 40960 positions of model qwen3-8b"
    ):
        plan_memory(H200, QWEN3_8B, MemorySettings(max_model_len=50_000))


def run(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(memory)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_one_json_object() -> None:
    code, out, _ = run("--slots", "56", "--window", "8", "--block-size", "64", "--json")
    assert code == 0
    expected = plan_memory(H200, QWEN3_8B, replace(HYBRID, block_size=64, window=8))
    assert json.loads(out) == expected.as_dict()


def test_the_command_finds_as_many_blocks_as_a_simulation_starts_with() -> None:
    code, out, _ = run("--gpu", "h200", "--model", "qwen3-8b", "--json")
    assert code == 0
    assert (
        json.loads(out)["num_blocks"]
        == Scenario("full-kv", "h200", "qwen3-8b").set_up().limits.num_blocks
        == 3035
    )
    assert (
        json.loads(out)["settings"]["max_batched_tokens"]
        == EngineSettings.max_batched_tokens
        == STEP_TOKENS
    )
    assert json.loads(out)["settings"]["max_running"] == EngineSettings.max_running


def test_the_table_shows_every_term_and_whether_the_slots_fit() -> None:
    code, out, _ = run(
        "--gpu", "h200", "--model", "qwen3-8b", "--slots", "56", "--budget-blocks", "9"
    )
    plan = plan_memory(H200, QWEN3_8B, HYBRID)
    assert code == 0
    for name, value in plan.terms.items():
        assert any(name in line and f"{value:,}" in line for line in out.splitlines()), name
    assert f"{plan.num_blocks:,} blocks of 256 tokens" in out
    assert "56 x 9 = 504 blocks (fits)" in out


def test_slots_beyond_the_pool_are_called_out() -> None:
    _, out, _ = run("--gpu", "l40s", "--slots", "200", "--budget-blocks", "17")
    assert "200 x 17 = 3,400 blocks (DOES NOT FIT" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h20"), "error: unknown GPU 'h20'; did you mean 'h200'?"),
        (
            ("--gpu", "rtx4090", "--model", "qwen3-32b"),
            "error: model qwen3-32b does not fit on rtx4090",
        ),
        (
            ("--window", "16"),
            "error: --window says how requests are compressed, which needs query slots",
        ),
        (("--no-global-scores",), "error: --global-scores says how requests are compressed"),
        (("--reserve-gib", "nan"), "must be finite, got nan"),
    ],
)
def test_errors_go_to_stderr_with_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
