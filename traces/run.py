"""A finished run, of the simulator or of the engine: its tables, read when asked for, and what they amount to."""

from collections.abc import Mapping
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
        """The summary as a table in a notebook."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(_show(value))}</td></tr>"
            for name, value in self.summary.items()
        )
        return f"<table><caption>{escape(str(self.manifest['policy']))}</caption>{rows}</table>"


def load_run(folder: Path | str) -> Run:
    """A recording as a run. Raises RecordingError."""
    return Run(Recording(folder))


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{name} {_show(item)}" for name, item in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
