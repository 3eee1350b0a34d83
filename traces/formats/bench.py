"""Benchmark workloads (W1, W2, W4): lengths and a seed for the prompt's tokens. Equal seeds mean
equal prompts.
"""

from pathlib import Path
from typing import Any

import numpy as np

from zlab.traces.formats.layout import (
    BadRowError,
    Format,
    Record,
    Row,
    length,
    number,
    shown,
    text,
    whole,
)

FIRST_TOKEN_ID = 1000
END_TOKEN_ID = 150_000


class _BenchReader:
    """Reads rows and keeps one tuple of token ids for each distinct prompt, so that samples of a
    problem share it in memory.
    """

    def __init__(self, _path: Path) -> None:
        self._prompts: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def _prompt(self, value: Any, prompt_tokens: int) -> tuple[int, ...]:
        words = value if isinstance(value, list) else [value]
        if not words or any(type(word) is not int or word < 0 for word in words):
            raise BadRowError(
                "prompt_seed is not a seed",
                f"prompt_seed is {shown(value)}, must be whole numbers >= 0",
            )
        key = (tuple(words), prompt_tokens)
        if key not in self._prompts:
            drawn = np.random.default_rng(value).integers(
                FIRST_TOKEN_ID, END_TOKEN_ID, size=prompt_tokens
            )
            self._prompts[key] = tuple(drawn.tolist())
        return self._prompts[key]

    def __call__(self, record: Record) -> Row:
        prompt_tokens = length("prompt_len", record["prompt_len"])
        output_tokens = length("output_len", record["output_len"])
        return {
            "id": str(whole("id", record["id"])),
            "arrival_s": number("arrival", record["arrival"]),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "max_tokens": output_tokens,
            "prompt_ids": self._prompt(record["prompt_seed"], prompt_tokens),
            "cls": text("kind", record.get("kind")),
        }


BENCH = Format(
    name="bench",
    what="benchmark workload with prompt seeds (JSON Lines)",
    layout="jsonl",
    required=("id", "prompt_seed", "prompt_len", "output_len", "arrival"),
    begin=_BenchReader,
    ticks=False,
    source="benchmark workload",
)
