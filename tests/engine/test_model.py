"""The own decoder against transformers: the same logits for whole, chunked, packed and
one-token-at-a-time input.

The layers' Triton kernels on the CPU.

Tables of measured products: how one is asked, and what is in those that are shipped.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.engine_cases import TINY, save_tiny
from tests.engine.interpreter import passed_in_the_interpreter
from tests.engine.kernel_cases import INTERPRETED, DenseContext
from tests.house_source import ROOT
from zlab.engine.model.decoder import Decoder
from zlab.engine.model.layers import AttentionContext, HeadShape, LayerWeights, TorchSteps
from zlab.engine.model.loader import allocate, fill, read_safetensors, safetensors_files
from zlab.engine.model.spec import config_from_hf, find_row, read_json
from zlab.engine.model.tensor_parallel import Parallel

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
    config = config_from_hf(read_json(folder / "config.json"), name="tiny")
    weights = allocate(config, Parallel(), dtype=dtype, device=device)
    fill(
        config, weights, Parallel(), read_safetensors(safetensors_files(folder)), source=str(folder)
    )
    return Decoder(config, weights)


def random_ids(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))


def expected_logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


@pytest.mark.parametrize("kind", list(TINY))
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    decoder = load(tmp_path)
    ids = random_ids(1, 150)
    context = DenseContext(3, 1)
    context.begin([(0, 150)])
    logits = decoder.logits(decoder.forward(ids, torch.arange(150), context))
    torch.testing.assert_close(logits, expected_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-scaled"])
def test_packed_chunks_and_decodes_equal_whole_sequences(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    decoder = load(tmp_path)
    sequences = [random_ids(2, 40), random_ids(3, 7), random_ids(4, 23)]
    # Each step packs some next tokens of some sequences: whole prompts, chunks and single tokens,
    # mixed.
    steps = [[(0, 16), (1, 6)], [(1, 1), (0, 16), (2, 20)], [(2, 1), (0, 7)], [(0, 1), (2, 2)]]
    done = [0, 0, 0]
    context = DenseContext(3, 3)
    found: list[list[torch.Tensor]] = [[], [], []]
    for step in steps:
        ids, positions = [], []
        for sequence, count in step:
            ids.append(sequences[sequence][done[sequence] : done[sequence] + count])
            positions.append(torch.arange(done[sequence], done[sequence] + count))
            done[sequence] += count
        context.begin(step)
        logits = decoder.logits(decoder.forward(torch.cat(ids), torch.cat(positions), context))
        parts = torch.split(logits, [count for _, count in step])
        for (sequence, _), part in zip(step, parts, strict=True):
            found[sequence].append(part)
    assert done == [len(ids) for ids in sequences]
    for sequence_ids, pieces in zip(sequences, found, strict=True):
        torch.testing.assert_close(
            torch.cat(pieces), expected_logits(model, sequence_ids), rtol=1e-4, atol=1e-4
        )


def test_rows_choose_the_tokens_that_get_hidden_states(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    decoder = load(tmp_path)
    ids = random_ids(5, 12)
    hidden = []
    for rows in (None, torch.tensor([11, 3])):
        context = DenseContext(3, 1)
        context.begin([(0, 12)])
        hidden.append(decoder.forward(ids, torch.arange(12), context, rows))
    # products of fewer rows round differently
    torch.testing.assert_close(hidden[0][[11, 3]], hidden[1], rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path)
    decoder = load(tmp_path, torch.bfloat16)
    ids = random_ids(6, 50)
    context = DenseContext(3, 1)
    context.begin([(0, 50)])
    hidden = decoder.forward(ids, torch.arange(50), context)
    assert hidden.dtype == torch.bfloat16
    expected = expected_logits(model, ids)
    error = (decoder.logits(hidden).float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 3e-2  # rounding shows, and is no more than that


def test_layers_compile_without_a_graph_break(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    decoder = load(tmp_path)
    make_steps = partial(TorchSteps, compile_mode="default", backend="eager")
    compiled = Decoder(decoder.config, decoder.weights, make_steps=make_steps)
    for count in (9, 17):
        logits = []
        for model in (decoder, compiled):
            context = DenseContext(3, 1)
            context.begin([(0, count)])
            logits.append(
                model.logits(model.forward(random_ids(7, count), torch.arange(count), context))
            )
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


class Recorder(TorchSteps):
    """Plain steps that note what ran, with which weight and how many rows."""

    def __init__(self, shape: HeadShape, table: torch.Tensor) -> None:
        super().__init__(shape, table)
        self.ran: list[tuple[str, torch.Tensor, int]] = []

    def attention(
        self,
        index: int,
        layer: LayerWeights,
        delta: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(delta) == len(residual) == len(positions)
        assert delta.data_ptr() != residual.data_ptr(), "a step may overwrite its residual"
        self.ran.append(("attention", layer.qkv, len(delta)))
        return super().attention(index, layer, delta, residual, positions, context)

    def project(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        self.ran.append(("project", layer.output, len(attended)))
        return super().project(layer, attended)

    def feed_forward(
        self, layer: LayerWeights, delta: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.ran.append(("feed_forward", layer.gate_up, len(delta)))
        return super().feed_forward(layer, delta, residual)

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.ran.append(("head", weight, len(hidden)))
        return super().head(hidden, weight)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_warming_up_runs_every_product_once_a_count_and_leaves_no_trace(
    kind: str, tmp_path: Path
) -> None:
    save_tiny(kind, tmp_path)
    plain, fresh = load(tmp_path), load(tmp_path)
    made: list[Recorder] = []

    def make_steps(shape: HeadShape, table: torch.Tensor) -> Recorder:
        made.append(Recorder(shape, table))
        return made[0]

    decoder = Decoder(plain.config, plain.weights, make_steps=make_steps)
    decoder.warm_up(
        (1, 8, 300), (1, 3)
    )  # 300 tokens are more than positions, as those of several requests may be
    layer, stages = decoder.weights.layers[0], ("attention", "project", "feed_forward")
    ran = [(stage, rows) for stage, _, rows in made[0].ran]
    assert ran == [
        *((stage, rows) for rows in (1, 8, 300) for stage in stages),
        ("head", 1),
        ("head", 3),
    ]
    wanted = [*(layer.qkv, layer.output, layer.gate_up) * 3, *(decoder.weights.head,) * 2]
    assert [id(weight) for _, weight, _ in made[0].ran] == [id(weight) for weight in wanted]
    logits = []
    for model in (decoder, fresh):
        context = DenseContext(3, 1)
        context.begin([(0, 11)])
        logits.append(model.logits(model.forward(random_ids(8, 11), torch.arange(11), context)))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="is the outer process of the interpreter's tests")
def test_fused_layers_in_the_interpreter() -> None:
    assert "passed" in passed_in_the_interpreter("tests/engine/test_triton_layers.py")


pytest.importorskip("triton")
product_table = pytest.importorskip("zlab.engine.model.triton_layers")
products = pytest.importorskip("zlab.engine.model.triton_layers")

SHIPPED = sorted((ROOT / "engine" / product_table.TABLES).glob("*.json"))
QWEN3_8B = find_row("qwen3-8b")
SHAPES = {  # by name in a file: columns, depth, gated
    "qkv": (QWEN3_8B.qkv_width, QWEN3_8B.hidden_size, False),
    "output": (QWEN3_8B.hidden_size, QWEN3_8B.query_width, False),
    "gate-up": (QWEN3_8B.intermediate_size, QWEN3_8B.hidden_size, True),
    "down": (QWEN3_8B.hidden_size, QWEN3_8B.intermediate_size, False),
    "head": (QWEN3_8B.vocab_size, QWEN3_8B.hidden_size, False),
}


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def config_of(row: dict[str, Any]) -> Any:
    return None if row["config"] is None else products.ProductConfig(**row["config"])


def test_the_table_gives_the_next_larger_measured_rows() -> None:
    config = products.ProductConfig(16, 32, 32, 1, 4, 2)
    shape = product_table.ProductShape
    table = product_table.ProductTable(
        {shape(64, 192, False, 64): config, shape(64, 192, False, 128): None}
    )
    assert table.find(64, 192, gated=False, rows=1) == config
    assert table.find(64, 192, gated=False, rows=64) == config
    assert table.find(64, 192, gated=False, rows=65) is None
    assert table.find(64, 192, gated=False, rows=129) is None
    assert table.find(64, 192, gated=True, rows=1) is None
    assert len(product_table.table_for("A card nobody measured")) == 0


def test_the_cards_that_torch_names_find_their_table() -> None:
    assert "NVIDIA H200" in [read(file)["card"] for file in SHIPPED]
    for file in SHIPPED:
        rows = read(file)["products"]
        table = product_table.table_for(read(file)["card"])
        assert len(table) == len(rows) > 0, "a shape occurs twice"
        for row in rows:
            found = table.find(row["columns"], row["depth"], gated=row["gated"], rows=row["rows"])
            assert found == config_of(row)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_is_shipped_can_be_run_and_is_a_models(file: Path) -> None:
    """A shape that no layer has would be found by nobody, a config that does not fit stops the
    first step.
    """
    assert read(file)["model"] == QWEN3_8B.name
    for row in read(file)["products"]:
        columns, depth, gated = shape = row["columns"], row["depth"], row["gated"]
        assert shape == SHAPES[row["name"]], row
        config = config_of(row)
        if config is None:
            continue
        assert config.fits(columns, depth), row
        for extent in (config.rows, config.columns, config.depth):  # of a dot product in Triton
            assert extent >= 16, row
            assert extent & (extent - 1) == 0, row
        if (
            gated or row["name"] == "head"
        ):  # an activation needs whole sums, and parts of all logits are much to sum
            assert config.splits == 1, row
