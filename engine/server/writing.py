"""Disk work off the engine's thread: done in order by a thread of its own, and given up rather than waited for."""

import logging
import queue
import threading
from collections.abc import Callable

LOG = logging.getLogger("zlab.server")
MOST_WAITING = 50_000
Work = Callable[[], None]


class WritingThread:
    """Call it with what is to be done; it returns at once.

    A disk that fails, or that falls `most_waiting` pieces of work behind, ends the writing, not the engine: `failure`
    says why, and nothing more is done. What was written until then stays readable.
    """

    def __init__(self, name: str, most_waiting: int = MOST_WAITING) -> None:
        self.failure: Exception | None = None
        self._most_waiting = most_waiting
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, work: Work) -> None:
        """Do this after everything that was asked before; from any thread."""
        if self.failure is not None:
            return
        if self._work.qsize() >= self._most_waiting:
            self._fail(OSError(f"the disk is {self._most_waiting:,} pieces of work behind"))
            return
        self._work.put(work)

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not been begun."""
        return self._work.qsize()

    def close(self, timeout_s: float | None = None) -> bool:
        """Do what has been asked and end; False when that takes longer than `timeout_s`."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self.failure is not None:
                continue
            try:
                work()
            except Exception as error:  # a full disk, a folder that went away: the requests go on all the same
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        LOG.error("%s is given up: %s: %s", self._thread.name, type(error).__name__, error)
