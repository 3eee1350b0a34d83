"""A finished run, of the simulator or of the engine: its tables, read when asked for, and what they amount to."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from traces.metrics import summarize
from traces.recording import Recording

ALSO_IN_SUMMARY = ("digest", "wall_s", "policy", "workload_sha256")


class TableSource(Protocol):
    """Where a run's tables are: in memory or in a folder."""

    manifest: dict[str, Any]

    def table(self, name: str) -> pa.Table:
        """One table of `traces.recording.TABLES`."""


class Run:
    """A run to look at: `manifest`, `summary` (keys as in docs/METRICS.md) and the four tables of a recording.

    Tables are Arrow tables: `run.requests.to_pandas()` goes on in pandas.
    """

    def __init__(self, source: TableSource) -> None:
        self._source = source

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Where the run comes from and how it ended."""
        return self._source.manifest

    @cached_property
    def requests(self) -> pa.Table:
        """One row a request, in the order in which they ended."""
        return self._source.table("requests")

    @cached_property
    def steps(self) -> pa.Table:
        """One row a step."""
        return self._source.table("steps")

    @cached_property
    def events(self) -> pa.Table:
        """One row an event of the scheduler."""
        return self._source.table("events")

    @cached_property
    def blocks(self) -> pa.Table:
        """One row a change of one block."""
        return self._source.table("blocks")

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the run amounts to."""
        figures = summarize(self.requests, self.steps, self.manifest)
        return figures | {name: self.manifest[name] for name in ALSO_IN_SUMMARY}

    def _repr_html_(self) -> str:
        """The run as two tables in a notebook: single figures, and distributions with a column a percentile."""
        manifest, summary = self.manifest, self.summary
        title = f"{manifest['policy']}: {manifest['gpu']}, {manifest['model']}, {manifest['num_blocks']:,} blocks of "
        title += f"{manifest['block_size']} tokens" + ("" if manifest.get("complete", True) else " (incomplete)")
        single = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        spread = {name: value for name, value in summary.items() if isinstance(value, Mapping)}
        marks = list(next(iter(spread.values()), {}))
        head = "".join(f"<th>{escape(mark)}</th>" for mark in ("", *marks))
        return (
            f"<b>{escape(title)}</b><table>{''.join(_row(name, [value]) for name, value in single.items())}</table>"
            f"<table><tr>{head}</tr>"
            f"{''.join(_row(name, [value[mark] for mark in marks]) for name, value in spread.items())}</table>"
        )


def load_run(folder: Path | str) -> Run:
    """A recording as a run. Raises RecordingError."""
    return Run(Recording(folder))


def _row(name: str, values: Sequence[Any]) -> str:
    cells = "".join(f"<td style='text-align:right'>{escape(_show(value))}</td>" for value in values)
    return f"<tr><th style='text-align:left'>{escape(name)}</th>{cells}</tr>"


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
