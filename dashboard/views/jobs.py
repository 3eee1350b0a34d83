"""Simulations in the background: a thread each, a few at a time, with progress and a way to stop them."""

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from policies.core.limits import Limits
from policies.core.policy import Policy
from sim.replay import replay
from traces.workload import Workload

AT_ONCE = 2  # of all sessions together: more only slow each other down
_TURNS = threading.Semaphore(AT_ONCE)
_NAMING = threading.Lock()


class StoppedByUserError(Exception):
    """Raised inside a simulation that its user has stopped."""


@dataclass(frozen=True)
class Order:
    """What to simulate."""

    workload: Workload
    policy: Policy
    gpu: str
    model: str
    limits: Limits


@dataclass
class Job:
    """A simulation on its way; read by the page, written by its thread. `error` is None or says what went wrong."""

    order: Order
    folder: Path
    num_ended: int = 0
    simulated_s: float = 0.0
    started: bool = False
    stopped: bool = False
    error: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether its thread is still at work (or waits for its turn)."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def share(self) -> float:
        """Share of the requests that have ended."""
        return self.num_ended / max(len(self.order.workload), 1)

    def start(self) -> None:
        """Begin, as soon as it is its turn."""
        self._thread = threading.Thread(target=self._run, name=f"play {self.folder.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; what it did so far stays as a recording that is marked as incomplete."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        assert self._thread is not None
        self._thread.join(seconds)

    def _run(self) -> None:
        while not _TURNS.acquire(timeout=0.2):
            if self._stop.is_set():
                self.stopped = True
                return
        try:
            self.started = True
            order = self.order
            replay(
                order.workload,
                order.policy,
                order.gpu,
                order.model,
                order.limits,
                out=self.folder,
                progress=self._progress,
            )
        except StoppedByUserError:
            self.stopped = True
        except Exception as error:  # whatever it is belongs on the page, not into the server's log
            self.error = f"{type(error).__name__}: {error}"
        finally:
            _TURNS.release()

    def _progress(self, num_ended: int, num_requests: int, now_ns: int) -> None:
        self.num_ended, self.simulated_s = num_ended, now_ns * 1e-9
        if self._stop.is_set():
            raise StoppedByUserError


def new_folder(root: Path, name: str) -> Path:
    """An empty folder of its own for a run, also when two sessions ask at once."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:40] or "run"
    with _NAMING:
        base = root / f"{time.strftime('%m%d-%H%M%S')}-{plain}"
        folder, copy = base, 1
        while folder.exists():
            copy += 1
            folder = base.with_name(f"{base.name}-{copy}")
        folder.mkdir(parents=True)
    return folder
