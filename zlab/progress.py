"""A progress bar with the time left, on stderr, for whatever takes longer than two seconds."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOW_AFTER_S = 2.0
LINE_EVERY_S = 10.0  # where stderr is no terminal


class Bar:
    """Shown once its job has taken `SHOW_AFTER_S`: a bar on a terminal, a line now and then elsewhere.

    `silent` shows nothing where stderr is no terminal: a program reads what the command prints.
    """

    def __init__(self, what: str, total: int = 100, unit: str = "%", silent: bool = False) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        console = Console(file=sys.stderr)
        self._terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total)
        self._begun = time.monotonic()
        self._shown_at: float | None = None

    def __enter__(self) -> "Bar":
        return self

    def __call__(self, done: int, what: str | None = None) -> None:
        """Say how much is done, and of what if that changes."""
        self._what = what or self._what
        elapsed = time.monotonic() - self._begun
        if self._terminal:
            self._progress.update(self._task, completed=done, description=self._what)
            if self._shown_at is None and elapsed >= SHOW_AFTER_S:
                self._progress.start()
                self._shown_at = elapsed
        elif not self._silent and elapsed >= (
            SHOW_AFTER_S if self._shown_at is None else self._shown_at + LINE_EVERY_S
        ):
            self._shown_at = elapsed
            print(self._line(done, elapsed), file=sys.stderr, flush=True)

    def share(self, done: float) -> None:
        """Say which share of the job is done, 0..1."""
        self(round(done * self._total))

    def _line(self, done: int, elapsed: float) -> str:
        left = f", about {elapsed / done * (self._total - done):.0f} s left" if done else ""
        return f"{self._what}: {done:,} of {self._total:,} {self._unit} after {elapsed:.0f} s{left}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal and self._shown_at is not None:
            self._progress.stop()
