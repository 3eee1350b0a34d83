"""Made-up rows in every public format, and a way to lay them down as files."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-02-28 23:59:59.9999999,300,12\r\n2024-02-29 00:00:00.0000001,41,7"
)
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
7,ChatGPT,100,20,120,Conversation log
9,GPT-4,0,0,0,API log
9,GPT-4,11,5,16,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
100.0,ab-1,12,GPT-4,30,6,36,Conversation log
101.0,,3.5,ChatGPT,31,7,38,API log
"""
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1, "output_length": 1, "hash_ids": [3]},
]
BAILIAN: list[dict[str, Any]] = [
    {
        "chat_id": 4,
        "parent_chat_id": -1,
        "timestamp": 2.5,
        "input_length": 40,
        "output_length": 9,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 8, 9],
    },
    {
        "chat_id": 5,
        "parent_chat_id": 4,
        "timestamp": 3.0,
        "input_length": 48,
        "output_length": 3,
        "type": "text",
        "turn": 2,
        "hash_ids": [1, 8, 9],
    },
]
SERVEGEN: list[dict[str, Any]] = [
    {"request_id": 3, "type": "text", "input_length": 20, "hash_ids": [5, 6], "img_ids": []}
]
BENCH: list[dict[str, Any]] = [
    {
        "id": 0,
        "kind": "a",
        "problem": 0,
        "sample": 0,
        "prompt_seed": [1, 2],
        "prompt_len": 5,
        "output_len": 8,
        "arrival": 0.0,
    },
    {
        "id": 1,
        "kind": "a",
        "problem": 0,
        "sample": 1,
        "prompt_seed": [1, 2],
        "prompt_len": 5,
        "output_len": 9,
        "arrival": 0.0,
    },
    {
        "id": 2,
        "kind": "b",
        "problem": 1,
        "sample": 0,
        "prompt_seed": 3,
        "prompt_len": 4,
        "output_len": 2,
        "arrival": 0.0,
    },
]


def write_text(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
