"""What was asked of a live run, kept beside its recording, so that its decisions can be made again from the folder."""

import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from traces.recording import RecordingError
from traces.torn import TornLineWarning
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

    def flush(self) -> None:
        """Hand everything written to the operating system: a kill loses none of it."""
        self._file.flush()

    def close(self) -> None:
        """All are written."""
        self._file.close()


def read_asked(folder: Path | str) -> Sequence[TraceRequest]:
    """The requests of a recording by number. Raises RecordingError where the folder has none or they can't be read.

    A last line that a kill left half written is left out with a `TornLineWarning`.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise RecordingError(f"{folder}: has no {FILE}: only a recording of the engine says what it was asked")
    found = []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        warnings.warn(TornLineWarning(path, len(data) - len(whole)), stacklevel=2)
    for number, line in enumerate(whole.splitlines(), start=1):
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
