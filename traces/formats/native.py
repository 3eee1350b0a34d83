"""The project's own format `llm-trace/1`: JSON Lines of `TraceRequest` fields, with a file
NAME.meta.json beside them.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from zlab.traces.block_ids import BlockChains
from zlab.traces.choices import unknown_choice
from zlab.traces.formats.layout import (
    BadRowError,
    Format,
    Record,
    Row,
    ids,
    length,
    number,
    shown,
    text,
    trace_name,
    whole,
)
from zlab.traces.workload import REQUEST_FIELDS, TraceError, Workload, WorkloadMeta, request_to_line

SCHEMA = "llm-trace/1"
RECORDED_LIVE = "recorded live"
"""The note in a trace's modifications that says: written line by line while requests ended."""
META_FIELDS = tuple(f.name for f in fields(WorkloadMeta))


def _count(name: str, value: Any) -> int:
    return whole(name, value, 0, 2**31 - 1)


def _priority(name: str, value: Any) -> int:
    return whole(name, value, -(2**31), 2**31 - 1)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "id": text,
    "prompt_tokens": length,
    "output_tokens": length,
    "arrival_s": number,
    "max_tokens": length,
    "prefix_ids": ids,
    "prompt_ids": ids,
    "output_ids": ids,
    "session": text,
    "turn": _count,
    "parent": text,
    "think_s": number,
    "priority": _priority,
    "cls": text,
    "model": text,
    "reasoning_tokens": _count,
    "source_e2e_s": number,
    "status": text,
}
"""How each field is checked when it is given; null stands for not given."""
REQUIRED = ("id", "prompt_tokens")


def meta_path(path: Path) -> Path:
    """Return the path of the metadata of the trace at `path`: NAME.meta.json in the same folder."""
    return path.with_name(trace_name(path) + ".meta.json")


def is_live(meta: WorkloadMeta | None) -> bool:
    """Return whether a trace was written while requests ended. Its writer may have been stopped
    within a line.
    """
    return meta is not None and RECORDED_LIVE in meta.modifications


def write_meta(path: Path, meta: WorkloadMeta) -> None:
    """Write the metadata of the trace at `path`, atomically."""
    with text_output(meta_path(path)) as file:
        file.write(json.dumps({"schema": SCHEMA, **asdict(meta)}, indent=2) + "\n")


def _check_meta(path: Path, found: dict[str, Any]) -> None:
    unknown = sorted(found.keys() - set(META_FIELDS) - {"schema"})
    if unknown:
        raise TraceError(f"{path}: {unknown_choice('field', unknown[0], META_FIELDS)}")
    if found.get("schema", SCHEMA) != SCHEMA:
        raise TraceError(f"{path}: schema is {found['schema']!r}, must be {SCHEMA!r}")
    dropped = found.get("dropped", {})
    if not isinstance(dropped, dict) or not all(
        type(n) is int and n >= 0 for n in dropped.values()
    ):
        raise TraceError(f"{path}: dropped is {shown(dropped)}, must be counts by reason")
    for name in ("rows_read", "rows_kept"):
        if type(found.get(name, 0)) is not int or found.get(name, 0) < 0:
            raise TraceError(f"{path}: {name} is {shown(found[name])}, must be a whole number >= 0")
    if found.get("rows_read", 0) != found.get("rows_kept", 0) + sum(dropped.values()):
        raise TraceError(
            f"{path}: rows do not add up: rows_read {found.get('rows_read', 0)} is not rows_kept "
            f"{found.get('rows_kept', 0)} + dropped {sum(dropped.values())}"
        )
    block_size = found.get("block_size")
    if block_size is not None and not (type(block_size) is int and block_size >= 1):
        raise TraceError(f"{path}: block_size is {shown(block_size)}, must be a whole number >= 1")
    for name, choices in (
        ("block_id_kind", ("chained", "content")),
        ("last_block", ("partial", "full")),
    ):
        if found.get(name) not in {None, *choices}:
            raise TraceError(
                f"{path}: {name} is {shown(found[name])}, must be one of {', '.join(choices)}"
            )
    resolution = found.get("arrival_resolution_s")
    if resolution is not None and not (
        type(resolution) in {int, float} and 0 < resolution < float("inf")
    ):
        raise TraceError(
            f"{path}: arrival_resolution_s is {shown(resolution)}, must be a number above 0"
        )
    modifications = found.get("modifications", [])
    if not isinstance(modifications, list) or not all(isinstance(m, str) for m in modifications):
        raise TraceError(
            f"{path}: modifications is {shown(modifications)}, must be a list of strings"
        )
    for name in ("name", "source", "licence", "sha256"):
        if not isinstance(found.get(name, ""), str):
            raise TraceError(f"{path}: {name} is {shown(found[name])}, must be a string")


def read_meta(path: Path) -> WorkloadMeta | None:
    """Return the metadata of the trace at `path`, or None without any. Raise TraceError for unknown
    or wrong fields.
    """
    file = meta_path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TraceError(f"{file}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise TraceError(f"{file}: must hold one JSON object")
    _check_meta(file, found)
    values = {name: value for name, value in found.items() if name != "schema"}
    values["modifications"] = tuple(values.get("modifications", ()))
    return WorkloadMeta(**{"name": trace_name(path), **values})


class _NativeReader:
    """Checks every field and chains content ids. The first row decides whether the trace has times
    or is an offline batch.
    """

    def __init__(self, path: Path) -> None:
        self._meta = read_meta(path) or WorkloadMeta(name=trace_name(path))
        self._chains = BlockChains() if self._meta.block_id_kind == "content" else None
        self._timed: bool | None = None

    def __call__(self, record: Record) -> Row:
        row: Row = {}
        for name, value in record.items():
            check = CHECKS.get(name)
            if check is None:
                words = unknown_choice("field", name, REQUEST_FIELDS)
                raise BadRowError(f"unknown field {name!r}", words)
            if value is not None:
                row[name] = check(name, value)
        for name in REQUIRED:
            if row.get(name) is None:
                raise BadRowError(f"{name} is empty")
        self._check_time("arrival_s" in row)
        for name, tokens in (("prompt_ids", "prompt_tokens"), ("output_ids", "output_tokens")):
            if name in row and len(row[name]) != row.get(tokens):
                raise BadRowError(
                    f"{name} do not match {tokens}",
                    f"{name} holds {len(row[name])} ids, {tokens} is {row.get(tokens)}",
                )
        if "prefix_ids" in row:
            row["prefix_ids"] = self._prefix(row["prefix_ids"], row["prompt_tokens"])
        return row

    def _check_time(self, timed: bool) -> None:
        if self._timed is None:
            self._timed = timed
        if timed != self._timed:
            expected = (
                "a time as in the rows before" if self._timed else "null as in the rows before"
            )
            raise BadRowError("arrival_s mixes times and null", f"arrival_s must be {expected}")

    def _prefix(self, found: Sequence[int], prompt_tokens: int) -> Sequence[int]:
        meta = self._meta
        if meta.block_size is None or meta.block_id_kind is None or meta.last_block is None:
            raise BadRowError(
                "prefix_ids without block size",
                "prefix_ids need block_size, block_id_kind and last_block in NAME.meta.json",
            )
        partial = meta.last_block == "partial"
        expected = (prompt_tokens + (meta.block_size - 1 if partial else 0)) // meta.block_size
        if len(found) != expected:
            raise BadRowError(
                "prefix_ids do not match the prompt's length",
                f"prefix_ids holds {len(found)} ids, must be {expected} for the "
                f"{'started' if partial else 'full'} blocks of {prompt_tokens} tokens in blocks "
                f"of {meta.block_size}",
            )
        return found if self._chains is None else self._chains.chain(found)


NATIVE = Format(
    name="native",
    what=f"{SCHEMA} (JSON Lines + NAME.meta.json)",
    layout="jsonl",
    required=("id", "arrival_s", "prompt_tokens"),
    begin=_NativeReader,
    ticks=False,
)


@contextmanager
def text_output(path: Path) -> Iterator[io.TextIOBase]:
    """Open a text file for writing, gzipped if its name ends in `.gz` (same text, same bytes). The
    file appears only when it is whole.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as raw:
            data = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.name.endswith(".gz") else raw
            with io.TextIOWrapper(data, encoding="utf-8", newline="\n") as lines:
                yield lines
        temporary.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_native(workload: Workload, path: Path | str) -> None:
    """Write NAME.jsonl (or .jsonl.gz) and NAME.meta.json. Reading them back gives an equal
    workload.
    """
    path = Path(path)
    with text_output(path) as lines:
        lines.writelines(map(request_to_line, workload))
    write_meta(path, workload.meta)
