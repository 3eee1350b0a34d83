"""What happens in the engine, for those who look on: metrics, recordings, a watch. All calls on the engine's thread."""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from engine.server.job import Entry
from engine.server.lanes import Lane
from policies.core.events import Int64Array, Sink

LOG = logging.getLogger("zlab.server")


class Observer:
    """Override what you want to know; every call must return quickly, for the engine waits. Does nothing itself."""

    def sink(self, lane_name: str) -> Sink | None:
        """Where the journal of a lane's scheduler goes, too; asked before each engine of that lane is built."""
        return None

    def begin(self, lane: Lane) -> None:
        """A lane is there, before its first request."""

    def arrived(self, lane: Lane, entry: Entry) -> None:
        """The scheduler has a request; one that it refuses ends at once, too."""

    def first_token(self, lane: Lane, entry: Entry) -> None:
        """The first token of an output has come to the host."""

    def ended(self, lane: Lane, entry: Entry) -> None:
        """An output's only terminal event; `entry.finish_reason` is stop, length, abort, error or refused."""

    def stepped(self, lane: Lane) -> None:
        """A step was planned; `lane.engine.loop.ended` holds who has ended since, and is emptied after this."""

    def idle(self) -> None:
        """Nothing is left to do: the thread is about to wait for a message."""

    def crashed(self, lane: Lane, error: Exception) -> None:
        """A step failed: its requests are about to end, and the engine to be replaced by a new one."""

    def rebuilt(self, lane: Lane) -> None:
        """`lane.engine` is a new one."""

    def stopped(self) -> None:
        """The engine's thread ends; nothing more will be called."""


class Observers(Observer):
    """Tells all of them; one that fails is reported and left out from then on, the engine goes on."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self.failed: list[str] = []  # those that were left out, and what they died of

    def sink(self, lane_name: str) -> Sink | None:
        """One sink for all that want the journal; None if nobody does."""
        wanted = [(observer, found) for observer in self._observers if (found := observer.sink(lane_name)) is not None]
        if not wanted:
            return None

        def write(rows: Int64Array, blocks: Int64Array) -> None:
            for observer, found in wanted:
                if observer in self._observers:
                    self._guarded(observer, partial(found, rows, blocks))

        return write

    def begin(self, lane: Lane) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.begin(lane))

    def arrived(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.arrived(lane, entry))

    def first_token(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.first_token(lane, entry))

    def ended(self, lane: Lane, entry: Entry) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.ended(lane, entry))

    def stepped(self, lane: Lane) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.stepped(lane))

    def idle(self) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.idle())

    def crashed(self, lane: Lane, error: Exception) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.crashed(lane, error))

    def rebuilt(self, lane: Lane) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.rebuilt(lane))

    def stopped(self) -> None:
        """As in `Observer`."""
        self._tell(lambda observer: observer.stopped())

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            self._guarded(observer, partial(call, observer))

    def _guarded(self, observer: Observer, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # somebody else's program: it must not take the engine down with it
            self._observers.remove(observer)
            self.failed.append(f"{type(observer).__name__}: {type(error).__name__}")
            LOG.exception("observer %s failed and is left out from now on", type(observer).__name__)
