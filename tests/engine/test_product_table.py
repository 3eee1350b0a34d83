"""Tables of measured products: how one is asked, and what is in those that are shipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import find_row
from tests.house_source import ROOT

pytest.importorskip("triton")
product_table = pytest.importorskip("engine.product_table")
products = pytest.importorskip("engine.products")

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
    table = product_table.ProductTable({shape(64, 192, False, 64): config, shape(64, 192, False, 128): None})
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
        assert len(table) == len(rows) > 0, "a shape stands twice"
        for row in rows:
            found = table.find(row["columns"], row["depth"], gated=row["gated"], rows=row["rows"])
            assert found == config_of(row)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_is_shipped_can_be_run_and_is_a_models(file: Path) -> None:
    """A shape that no layer has would be found by nobody, a config that does not fit stops the first step."""
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
        if gated or row["name"] == "head":  # an activation needs whole sums, and parts of all logits are much to sum
            assert config.splits == 1, row
