"""Simulations that the page starts: each in a thread of its own, a few at a time, with progress and
a way to stop it.
"""

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from zlab.dashboard.views.page import escaped
from zlab.policies.core.plan import SchedulerLimits
from zlab.policies.core.policy import Policy
from zlab.sim.replay import find_cost, replay
from zlab.sim.specs import ModelSpec, find_gpu, find_model
from zlab.traces.workload import Workload

AT_ONCE = 2  # of all sessions together; more would slow each other down
_TURNS = threading.Semaphore(AT_ONCE)
_NAMING = threading.Lock()


class StoppedByUserError(Exception):
    """Raised inside a simulation that its user has stopped."""


@dataclass(frozen=True)
class RunRequest:
    """What to simulate."""

    workload: Workload
    policy: Policy
    gpu: str
    model: str | ModelSpec
    limits: SchedulerLimits
    cost: str | None = None  # name of a measured profile; None: the card's roofline
    pretended: str | None = None  # why no such machine can be
    plan_ahead: bool | None = None  # None: as runs with these times are planned
    length_multiplier: float = 1.0


@dataclass
class PlayJob:
    """A simulation in the background. The page reads it; its thread writes it. `error` is None or
    the reason of the failure.
    """

    request: RunRequest
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
        """Whether the thread runs or waits for its turn."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def share(self) -> float:
        """Share of the requests that have ended."""
        return self.num_ended / max(len(self.request.workload), 1)

    def start(self) -> None:
        """Start the thread; it waits for its turn."""
        self._thread = threading.Thread(
            target=self._run, name=f"play {self.folder.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ask the simulation to end. Its recording stays and is marked as incomplete."""
        self._stop.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end, at most `seconds`."""
        assert self._thread is not None
        self._thread.join(seconds)

    def _run(self) -> None:
        while not _TURNS.acquire(timeout=0.2):
            if self._stop.is_set():
                self.stopped = True
                return
        try:
            self.started = True
            request = self.request
            gpu = find_gpu(request.gpu)
            model = find_model(request.model) if isinstance(request.model, str) else request.model
            size = request.limits.block_size
            replay(
                request.workload,
                request.policy,
                gpu,
                model,
                request.limits,
                find_cost(request.cost, request.policy, gpu, model, size),
                self.folder,
                progress=self._progress,
                plan_ahead=request.cost is not None
                if request.plan_ahead is None
                else request.plan_ahead,
                length_multiplier=request.length_multiplier,
                pretended=request.pretended,
            )
        except StoppedByUserError:
            self.stopped = True
        except Exception as error:  # any error belongs on the page, not into the server's log
            self.error = f"{type(error).__name__}: {error}"
        finally:
            _TURNS.release()

    def _progress(self, num_ended: int, num_requests: int, now_ns: int) -> None:
        self.num_ended, self.simulated_s = num_ended, now_ns * 1e-9
        if self._stop.is_set():
            raise StoppedByUserError


def new_folder(root: Path, name: str) -> Path:
    """Create an empty folder for a run, also when two sessions ask at the same time."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:40] or "run"
    with _NAMING:
        base = root / f"{time.strftime('%m%d-%H%M%S')}-{plain}"
        folder, copy = base, 1
        while folder.exists():
            copy += 1
            folder = base.with_name(f"{base.name}-{copy}")
        folder.mkdir(parents=True)
    return folder


@st.fragment(run_every=0.5)
def progress_of(job: PlayJob) -> None:
    """Show the progress twice a second; redraw the page when the run has ended."""
    if not job.running:
        st.rerun(scope="app")
    st.subheader(f"Running {escaped(job.request.policy.name)}", anchor=False)
    words = (
        f"{job.num_ended:,} of {len(job.request.workload):,} requests, {job.simulated_s:,.1f} "
        f"simulated seconds"
    )
    st.progress(
        min(job.share, 1.0),
        words if job.started else "waits for its turn: other sessions are simulating",
    )
    st.button("Cancel", on_click=job.stop, key="cancel", icon=":material/stop:")
