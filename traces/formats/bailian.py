"""Qwen-Bailian traces and ServeGen's offline format: 16-token blocks with *content* ids, which the
reader chains.

Content ids alone would overstate reuse: a block's content may occur again after another prefix, but
then its keys and values differ.
"""

from pathlib import Path
from typing import Any

from zlab.traces.block_ids import BlockChains
from zlab.traces.formats.layout import Format, Record, Row, block_ids, length, text, ticks, whole

BLOCK_SIZE = 16
CHAINED = "content block ids chained"


def _chat_id(name: str, value: Any) -> str:
    return (
        str(whole(name, value))
        if type(value) is int
        else text(name, value) or str(whole(name, value))
    )


class _BailianReader:
    def __init__(self, _path: Path) -> None:
        self._chains = BlockChains()
        self._sessions: dict[str, str] = {}

    def __call__(self, record: Record) -> Row:
        prompt_tokens = length("input_length", record["input_length"])
        contents = block_ids("hash_ids", record["hash_ids"], prompt_tokens, BLOCK_SIZE)
        identity = _chat_id("chat_id", record["chat_id"])
        row: Row = {
            "id": identity,
            "ticks": ticks("timestamp", record["timestamp"]),
            "prompt_tokens": prompt_tokens,
            "output_tokens": length("output_length", record["output_length"]),
            "turn": whole("turn", record["turn"], 0, 2**31 - 1),
            "cls": text("type", record.get("type")),
        }
        if record["parent_chat_id"] not in {-1, "-1"}:
            row["parent"] = _chat_id("parent_chat_id", record["parent_chat_id"])
        row["session"] = self._sessions.setdefault(
            identity, self._sessions.get(row.get("parent", ""), identity)
        )
        row["prefix_ids"] = self._chains.chain(contents)
        return row


BAILIAN = Format(
    name="bailian",
    what="Qwen-Bailian trace (JSON Lines)",
    layout="jsonl",
    required=(
        "chat_id",
        "parent_chat_id",
        "timestamp",
        "input_length",
        "output_length",
        "turn",
        "hash_ids",
    ),
    begin=_BailianReader,
    source="Qwen-Bailian anonymous dataset",
    licence="Apache-2.0",
    arrival_resolution_s=0.001,
    block_size=BLOCK_SIZE,
    block_id_kind="chained",
    last_block="partial",
    modifications=(CHAINED,),
)


class _ServeGenOfflineReader:
    def __init__(self, _path: Path) -> None:
        self._chains = BlockChains()

    def __call__(self, record: Record) -> Row:
        prompt_tokens = length("input_length", record["input_length"])
        contents = block_ids("hash_ids", record["hash_ids"], prompt_tokens, BLOCK_SIZE)
        return {
            "id": _chat_id("request_id", record["request_id"]),
            "prompt_tokens": prompt_tokens,
            "prefix_ids": self._chains.chain(contents),
            "cls": text("type", record.get("type")),
        }


SERVEGEN_OFFLINE = Format(
    name="servegen",
    what="ServeGen offline batch (JSON Lines; no times, no output lengths)",
    layout="jsonl",
    required=("request_id", "input_length", "hash_ids"),
    begin=_ServeGenOfflineReader,
    source="github.com/alibaba/ServeGen",
    licence="Apache-2.0",
    block_size=BLOCK_SIZE,
    block_id_kind="chained",
    last_block="partial",
    modifications=(CHAINED,),
)
