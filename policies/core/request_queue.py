"""The waiting queue: which request is admitted next."""

from collections.abc import Iterator
from heapq import heappop, heappush, nsmallest

from zlab.policies.core.policy import Key, Order
from zlab.policies.core.request import Request

Entry = tuple[Key, int, Request]  # (key, number, request)
SessionEntry = tuple[
    int, Key, int, str | None
]  # (service, key and number of the session's head, session)


class RequestQueue:
    """Requests by the order's key, then by submission: one heap, or one for each session where
    service is shared fairly.

    Fair sharing keeps a virtual token counter for each session (Sheng et al., "Fairness in serving
    large language models", 2024). The session with the least service is next. A session that
    returns after being idle starts at the counter of the session served last, so that no session
    can save up service. Requests without a session share one counter.
    """

    __slots__ = ("_fair", "_heaps", "_level", "_live", "_num_waiting", "_service", "_sessions")

    def __init__(self, order: Order) -> None:
        self._fair = order.fair_by_session
        self._heaps: dict[str | None, list[Entry]] = {}
        self._live: dict[
            int, Entry
        ] = {}  # an entry that is not in here has been removed and is skipped
        self._sessions: list[
            SessionEntry
        ] = []  # may be out of date: service only grows, so the true place is further back
        self._service: dict[str | None, int] = {}
        self._num_waiting: dict[str | None, int] = {}
        self._level = 0

    def succeed(self, old: "RequestQueue") -> None:
        """Take over the queue of another order. The service of sessions is kept where both orders
        are fair.
        """
        if self._fair and old._fair:
            self._service, self._level = dict(old._service), old._level

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in self._live.values())

    def push(self, request: Request, key: Key) -> None:
        """Add a request."""
        session = request.session if self._fair else None
        waiting = self._num_waiting.get(session, 0)
        if not waiting:
            self._service[session] = max(self._service.get(session, 0), self._level)
        self._num_waiting[session] = waiting + 1
        heap = self._heaps.setdefault(session, [])
        entry = (key, request.number, request)
        self._live[request.number] = entry
        heappush(heap, entry)
        if self._fair and heap[0] is entry:
            heappush(self._sessions, (self._service[session], key, request.number, session))

    def charge(self, request: Request, tokens: int) -> None:
        """Charge service to the request's session."""
        if self._fair:
            self._service[request.session] = self._service.get(request.session, 0) + tokens

    def first(self) -> Request | None:
        """Return the next request without removing it; None when the queue is empty."""
        if not self._fair:
            heap = self._heaps.get(None)
            return self._head(None)[2] if heap and self._clean(None) else None
        while self._sessions:
            service, _, number, session = self._sessions[0]
            if self._clean(session):
                head = self._head(session)
                if service == self._service[session] and number == head[1]:
                    return head[2]
                heappop(self._sessions)
                heappush(self._sessions, (self._service[session], head[0], head[1], session))
            else:
                heappop(self._sessions)
        return None

    def behind_first(self, count: int) -> list[Request]:
        """Return up to `count` requests after the first, by key within and across sessions."""
        first = self.first()
        entries = (entry for entry in self._live.values() if entry[2] is not first)
        if self._fair:
            return [
                e[2]
                for e in nsmallest(
                    count, entries, key=lambda e: (self._service[e[2].session], e[0], e[1])
                )
            ]
        return [entry[2] for entry in nsmallest(count, entries, key=lambda entry: entry[:2])]

    def serve(self, request: Request) -> None:
        """Remove a request because it is admitted."""
        self.remove(request)
        if self._fair:
            self._level = self._service[request.session]

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        del self._live[request.number]
        session = request.session if self._fair else None
        self._num_waiting[session] -= 1
        if not self._num_waiting[session]:
            del self._num_waiting[session]

    def __contains__(self, request: Request) -> bool:
        return request.number in self._live

    def _head(self, session: str | None) -> Entry:
        return self._heaps[session][0]

    def _clean(self, session: str | None) -> bool:
        """Drop removed entries from the head of a session's heap. Returns False (and drops the
        heap) when none is left.
        """
        heap = self._heaps.get(session)
        if heap is None:
            return False
        while heap and self._live.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        if not heap:
            del self._heaps[session]
        return bool(heap)
