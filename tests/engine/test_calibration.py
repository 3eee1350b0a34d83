"""Calibration on the CPU: every cell holds exactly the steps it is named after, and what does not
fit is named.
"""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from zlab.engine.calibration import (
    FULL,
    QUICK,
    CalibrationSettings,
    CellError,
    Chunks,
    MeasuredEngine,
    beside_cell,
    check_chunks,
    compression_cell,
    contexts,
    decode_cell,
    measure,
    mixed_cells,
    prefill_cell,
    rested_cell,
    spread,
    swap_cells,
)
from zlab.engine.engine import EngineSettings
from zlab.engine.errors import EngineError
from zlab.engine.model.loader import LoadedModel, load_model
from zlab.policies.core.plan import prefill_pairs
from zlab.sim.fitting import fit
from zlab.sim.profiles import COUNTS, FIT_PARTS, TIMES, parse_measurements

torch.set_num_threads(1)
BLOCK = 16
SETTINGS = EngineSettings(
    model="dummy:tiny",
    num_blocks=200,
    block_size=BLOCK,
    max_batched_tokens=1024,
    max_running=8,
    device="cpu",
)
FAST = replace(
    QUICK,
    batches=(1, 3),
    contexts=(2,),
    prefills=(Chunks(1, 16), Chunks(2, 8, 2)),
    rested=(Chunks(1, 4),),
    mixed_batches=(2,),
    mixed_context=3,
    mixed=(Chunks(1, 16), Chunks(1, 4096)),
    beside=(3,),
    beside_batches=(1, 2),
    sources=(3, 5),
    compressed=(1, 2),
    swapped=(1, 3),
    sampled=(2,),
    repeats=2,
    steps=2,
)


@cache
def tiny() -> LoadedModel:
    return load_model("dummy:tiny")


def stage(policy: str = "full-kv", **changes: Any) -> MeasuredEngine:
    return MeasuredEngine(replace(SETTINGS, policy=policy, **changes), tiny())


def test_contexts_are_uneven_around_their_mean() -> None:
    found = contexts(8, 40, BLOCK)
    assert found == sorted(found, reverse=True)
    assert all(length % BLOCK == 0 and length > 0 for length in found)
    assert sum(found) / 40 == pytest.approx(8 * BLOCK, rel=0.05)
    assert max(found) > 2 * 8 * BLOCK > 4 * min(found)
    assert contexts(8, 1, BLOCK) == [8 * BLOCK]


def test_a_decode_cell_holds_decodes_of_the_whole_batch() -> None:
    found = decode_cell(stage(), 3, 4, 2, 3)
    assert (found["part"], found["decodes"], found["prefills"], found["prefill_tokens"]) == (
        "decode",
        3,
        0,
        0,
    )
    assert 3 * 4 * BLOCK * 0.8 < found["context_tokens"] < 3 * 4 * BLOCK * 1.2 + 3 * 40
    assert found["seconds"]["count"] == 2
    assert 0.0 < found["seconds"]["low"] <= found["seconds"]["median"] <= found["seconds"]["high"]


def test_a_prefill_cell_finds_its_prefixes_in_the_cache() -> None:
    on = stage()
    found = prefill_cell(on, Chunks(2, 24, 3), 3)
    assert (found["prefills"], found["prefill_tokens"], found["decodes"]) == (2, 48, 0)
    assert found["prefill_pairs"] == 2 * prefill_pairs(3 * BLOCK, 24)
    assert found["seconds"]["count"] == 3
    assert not on.engine.scheduler.state.requests


def test_a_rested_cell_begins_with_nothing_under_way() -> None:
    on = stage()
    found = rested_cell(on, Chunks(2, 24, 3), 3)
    assert (found["part"], found["prefills"], found["prefill_tokens"], found["before_s"]) == (
        "prefill",
        2,
        48,
        0.0,
    )
    assert found["seconds"]["count"] == 3
    assert found["seconds"]["low"] > 0.0


def test_mixed_cells_have_both_and_say_what_does_not_fit() -> None:
    found = mixed_cells(stage(), 4, 2, [Chunks(1, 32, 2), Chunks(1, 4096), Chunks(5, 1)], 2)
    assert isinstance(found[0], dict)
    assert (found[0]["decodes"], found[0]["prefills"], found[0]["prefill_tokens"]) == (4, 1, 32)
    assert found[0]["prefill_pairs"] == prefill_pairs(2 * BLOCK, 32)
    assert found[1] == "4,100 tokens are more than a step's 1,024"
    assert found[2] == "9 requests are more than max_running 8"


def test_compressions_start_together_beside_decodes() -> None:
    """Two prompts a step fit, the third comes a step later and is a token shorter."""
    on = stage("hybrid:budget.tokens=128", max_batched_tokens=2 * 9 * BLOCK + 9)
    found = beside_cell(on, 2, 3, 2, 8, 2)
    assert (found["decodes"], found["sequences"]) == (2, 3)
    assert (found["source_tokens"], found["kept_tokens"]) == (9 * BLOCK, 8 * BLOCK)
    assert found["after_context_tokens"] > found["context_tokens"] + 3 * 8 * BLOCK
    assert found["seconds"]["count"] == 2
    assert found["after"]["count"] == 4
    with pytest.raises(CellError, match="would come to the budget"):
        beside_cell(on, 2, 1, 8, 8, 1)


def test_compressions_alone_and_swaps() -> None:
    on = stage("hybrid:budget.tokens=64")
    found = compression_cell(on, 2, 5, 3, 4)
    assert (found["sequences"], found["source_tokens"], found["kept_tokens"]) == (2, 80, 48)
    assert found["seconds"]["count"] == 4
    assert found["seconds"]["median"] > 0.0
    with pytest.raises(CellError, match="400 blocks are needed, the pool has 200"):
        compression_cell(on, 8, 50, 3, 1)
    with pytest.raises(CellError, match="nothing is ever compressed"):
        compression_cell(stage(), 1, 3, 2, 1)
    out, back = swap_cells(on, 3, 2)
    assert (out["direction"], out["tokens"], back["direction"]) == ("out", 48, "in")


def test_what_does_not_fit_is_said() -> None:
    on = stage()
    for cell, message in (
        (lambda: decode_cell(on, 9, 1, 1, 1), "9 requests are more than max_running 8"),
        (lambda: decode_cell(on, 8, 40, 1, 1), "blocks are needed, the pool has 200"),
        (
            lambda: check_chunks(on, Chunks(1, 16 * 300)),
            "4,800 tokens are more than a step's 1,024",
        ),
    ):
        with pytest.raises(CellError, match=message):
            cell()
    assert not on.engine.scheduler.state.requests


def test_a_pause_is_no_steps_time() -> None:
    on = stage()
    for _ in range(2):
        on.submit(on.fresh(20), 3)
        on.play()
        on.pause()
    found = on.take()
    assert np.isnan(found.seconds[[0, 3]]).all()
    assert (found.seconds[[1, 2, 4, 5]] > 0.0).all()
    assert found.where(decodes=1).sum() == 4


def test_a_line_begins_the_same_every_time() -> None:
    on = stage()
    assert on.line(3, 10) == on.line(3, 9000)[:10] == stage().line(3, 10)
    assert on.line(3, 10) != on.line(4, 10)
    assert on.fresh(10) != on.fresh(10)
    assert max(on.line(5, 5000)) < tiny().config.vocab_size


def test_the_whole_calibration_can_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlab.engine.calibration.QUICK", FAST)
    told: list[str] = []
    settings = CalibrationSettings(
        "dummy:tiny", device="cpu", block_size=BLOCK, max_running=6, num_blocks=200, quick=True
    )
    document = measure(settings, tiny(), told.append)
    assert {row["part"] for row in document["steps"]} == {"decode", "prefill", "mixed"}
    for name in COUNTS:
        for row in document[name]:
            assert set(COUNTS[name]) | set(TIMES[name]) <= row.keys()
    skipped = {row["what"]: row["reason"] for row in document["skipped"]}
    assert skipped == {
        "host": "without a GPU the host is the device",
        "mixed beside 2 1 x 4096/16 blocks behind 0": "4,098 tokens are more than a step's 1,024",
    }
    assert "decode 3 x 2" in told
    profile = fit(parse_measurements(document))
    assert profile.fit_error.keys() == set(FIT_PARTS)
    assert (profile.gpu, profile.model, profile.dtype) == ("cpu-x86-64", "tiny", "float32")
    assert profile.shape["num_layers"] == 2


def test_time_is_kept() -> None:
    settings = CalibrationSettings(
        "dummy:tiny", device="cpu", block_size=BLOCK, max_running=4, quick=True, limit_s=0.0
    )
    document = measure(settings, tiny())
    assert not any(document[name] for name in COUNTS)
    assert {row["reason"] for row in document["skipped"]} == {
        "the 0 s were over",
        "without a GPU the host is the device",
    }


def test_what_was_measured_outlives_an_engine_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(on: MeasuredEngine, chunks: Chunks, repeats: int) -> dict[str, Any]:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr("zlab.engine.calibration.QUICK", FAST)
    monkeypatch.setattr("zlab.engine.calibration.prefill_cell", out_of_memory)
    settings = CalibrationSettings(
        "dummy:tiny", device="cpu", quick=True, block_size=BLOCK, max_running=6
    )
    document = measure(settings, tiny())
    assert {row["part"] for row in document["steps"]} == {"decode", "mixed"}
    assert document["compressions"]
    reasons = {
        row["reason"]
        for row in document["skipped"]
        if "prefill" in row["what"] or "draw" in row["what"]
    }
    assert reasons == {"the engine stopped at prefill 1 x 16/16 blocks behind 0: planted"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "multiple of 16 to be calibrated, got 24"),
        ({"max_running": 0}, "max_running must be at least"),
    ],
)
def test_settings_that_cannot_be_measured(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        CalibrationSettings("dummy:tiny", device="cpu", **changes)


def test_a_grid_spans_what_a_card_is_used_for() -> None:
    assert min(FULL.batches) == 1
    assert max(FULL.batches) == 256
    tokens = [chunks.number * chunks.tokens(256) for chunks in FULL.prefills]
    assert min(tokens) == 16
    assert 16_000 < max(tokens) <= 16_384
    assert spread([1.0, 2.0, 3.0]) == {"median": 2.0, "low": 1.2, "high": 2.8, "count": 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, copies on their own streams and pinned memory; the host by itself is measured,
    too.
    """
    monkeypatch.setattr(
        "zlab.engine.calibration.QUICK", replace(FAST, mixed=(Chunks(1, 16),), hosted=(1, 4))
    )
    settings = CalibrationSettings(
        "dummy:tiny", device="cuda", quick=True, block_size=BLOCK, max_running=6, num_blocks=200
    )
    document = measure(settings)
    assert document["skipped"] == []
    assert [row["decodes"] for row in document["host"]] == [1, 4]
    assert all(
        row["seconds"]["median"] > 1e-6 for row in (*document["swaps"], *document["compressions"])
    )
    profile = fit(parse_measurements(document))
    assert profile.fit_error.keys() == set(FIT_PARTS)
    assert profile.also["host_step_s"].value > 0.0


def test_measuring_kernels_needs_no_simulator() -> None:
    """The machine with the GPU has no SimPy: what measures kernels and what fits must not import
    it. Whole runs are compared with the simulator's, so SimPy is carried there for them.
    """
    code = (
        "import sys\nsys.modules['simpy'] = None\nimport benchmarks.kernels, "
        "benchmarks.model_step\nfrom zlab.sim.fitting import fit\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
