"""What was asked of a live run, kept beside its recording, so that its decisions can be made again from the folder."""

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from traces.recording import RecordingError
from traces.workload import IDS_FIELDS, TraceRequest, request_to_line

FILE = "asked.jsonl"  # line i: what the scheduler was told of request number i
KNOWN = frozenset(item.name for item in fields(TraceRequest))


class AskedFile:
    """Writes requests as they are handed in, a line each."""

    def __init__(self, folder: Path) -> None:
        self._file: io.TextIOWrapper = (folder / FILE).open("w", encoding="utf-8")

    def write(self, request: TraceRequest) -> None:
        """Append one request."""
        self._file.write(request_to_line(request))

    def close(self) -> None:
        """All are written."""
        self._file.close()


def read_asked(folder: Path | str) -> Sequence[TraceRequest]:
    """The requests of a recording by number. Raises RecordingError where the folder has none or they can't be read."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise RecordingError(f"{folder}: has no {FILE}: only a recording of the engine says what it was asked")
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            unknown = row.keys() - KNOWN
            if unknown:
                raise ValueError(f"unknown field {min(unknown)!r}")
            values: dict[str, Any] = {
                name: tuple(value) if name in IDS_FIELDS and value is not None else value for name, value in row.items()
            }
            found.append(TraceRequest(**values))
        except (ValueError, TypeError, AttributeError) as error:
            raise RecordingError(f"{path}:{number}: {error}") from error
    return found
