"""Ctrl-C during a simulation: taken at a step boundary, so that what is recorded is whole."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class AtBoundary:
    """While entered, the first Ctrl-C is kept until `check` is called, or until it ends; a second interrupts at once.

    Elsewhere than on the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._installed = False

    def __enter__(self) -> "AtBoundary":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def check(self) -> None:
        """Raise KeyboardInterrupt if it has been asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            if self._asked and kind is None:
                signal.raise_signal(signal.SIGINT)  # it came after the last check: whoever is outside hears of it
