"""Which way each few-row product is done: a table made by measurement on a card, read by that card's name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from engine.products import ProductConfig

TABLES = "tuned"  # folder of this package; one JSON file a card


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A weight `[columns, depth]` (twice the columns when gated) and the number of rows it is multiplied with."""

    columns: int
    depth: int
    gated: bool
    rows: int


class ProductTable:
    """Measured choices: a `ProductConfig`, or None where cuBLAS was the faster."""

    def __init__(self, choices: Mapping[ProductShape, ProductConfig | None]) -> None:
        self._choices = dict(choices)
        self._rows: dict[tuple[int, int, bool], list[int]] = {}
        for shape in sorted(choices, key=lambda shape: shape.rows):
            self._rows.setdefault((shape.columns, shape.depth, shape.gated), []).append(shape.rows)

    def find(self, columns: int, depth: int, *, gated: bool, rows: int) -> ProductConfig | None:
        """The choice for the nearest number of rows measured that is no smaller; None beyond the largest."""
        for measured in self._rows.get((columns, depth, gated), ()):
            if rows <= measured:
                return self._choices[ProductShape(columns, depth, gated, measured)]
        return None

    def __len__(self) -> int:
        return len(self._choices)


def table_from_rows(rows: Sequence[Mapping[str, Any]]) -> ProductTable:
    """The table in the `products` of a card's JSON file: columns, depth, gated, rows, config (an object or null)."""
    choices: dict[ProductShape, ProductConfig | None] = {}
    for row in rows:
        shape = ProductShape(row["columns"], row["depth"], row["gated"], row["rows"])
        choices[shape] = None if row["config"] is None else ProductConfig(**row["config"])
    return ProductTable(choices)


def table_for(card: str) -> ProductTable:
    """The table of the card that torch calls `card` ("NVIDIA H200"); empty, so cuBLAS for all, where none was made."""
    name = card.lower().replace(" ", "-") + ".json"
    file = files("engine") / TABLES / name
    if not file.is_file():
        return ProductTable({})
    return table_from_rows(json.loads(file.read_text(encoding="utf-8"))["products"])
