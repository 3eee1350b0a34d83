"""A GPU with two streams that share it: compute, and compression at low priority."""

from collections import deque
from collections.abc import Generator
from math import ceil
from typing import Any

import simpy


class Device:
    """While both streams are busy, compute loses `share` of its speed and compression keeps `rate` of its own.

    Equal ones are a card whose time is shared out, a larger rate one that does both faster than one after the other.
    Each stream runs its jobs in order. Times are whole nanoseconds; a job's end is rounded up.
    """

    def __init__(self, env: simpy.Environment, share: float, rate: float | None = None) -> None:
        """`share` in (0, 1), `rate` in (0, 1]; without it nothing is gained by doing both at once."""
        self._env = env
        self._beside = (1.0 - share, share if rate is None else rate)
        self._compute: deque[_Job] = deque()
        self._compression: deque[_Job] = deque()
        self._since: float = 0
        self._version = 0

    @property
    def compressing(self) -> bool:
        """A compression is running or waiting for the stream."""
        return bool(self._compression)

    def compute(self, work_ns: float) -> simpy.Event:
        """A job for the compute stream that takes `work_ns` alone; the event fires when it has finished."""
        return self._start(self._compute, work_ns)

    def compress(self, work_ns: float) -> simpy.Event:
        """A job for the compression stream."""
        return self._start(self._compression, work_ns)

    def _start(self, stream: "deque[_Job]", work_ns: float) -> simpy.Event:
        self._settle()
        job = _Job(work_ns, self._env.event())
        stream.append(job)
        self._schedule()
        return job.done

    def _rates(self) -> tuple[float, float]:
        if self._compute and self._compression:
            return self._beside
        return 1.0, 1.0

    def _settle(self) -> None:
        """Bring remaining work up to now and end the jobs that have none left."""
        elapsed = self._env.now - self._since
        self._since = self._env.now
        for stream, rate in zip((self._compute, self._compression), self._rates(), strict=True):
            if stream:
                stream[0].left_ns -= elapsed * rate
        for stream in (self._compute, self._compression):
            if stream and stream[0].left_ns <= 1e-6:
                stream.popleft().done.succeed()

    def _schedule(self) -> None:
        """Wake up when the first running job will have finished; a change before then makes the call void."""
        self._version += 1
        waits = [
            ceil(max(stream[0].left_ns, 0.0) / rate)
            for stream, rate in zip((self._compute, self._compression), self._rates(), strict=True)
            if stream
        ]
        if waits:
            self._env.process(self._wake(min(waits), self._version))

    def _wake(self, wait_ns: int, version: int) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(wait_ns)
        if version == self._version:
            self._settle()
            self._schedule()


class _Job:
    __slots__ = ("done", "left_ns")

    def __init__(self, work_ns: float, done: simpy.Event) -> None:
        self.left_ns = work_ns
        self.done = done
