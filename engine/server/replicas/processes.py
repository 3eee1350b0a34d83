"""`zlab serve --replicas N`: replicas as processes of this machine, started and restarted here.

    front process                               one process a replica
    local_replicas()
      starts `run_replica` -------------------> reads what to serve from its standard input,
      waits for the sockets                     opens the server, listens on its socket
    ProcessFleet.members(), every second        ends when its standard input does: a front that
      restarts a replica that has ended         is killed leaves no process behind

On CUDA each replica has a GPU, on the CPU they share the cores. Sockets lie in a folder of their
own that only this user can enter.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from zlab.engine.errors import EngineError
from zlab.engine.server.context import ServerSettings
from zlab.engine.server.launch import Process
from zlab.engine.server.middleware import Keys
from zlab.engine.server.replicas.fleet import (
    FRONT_PARTS_PER_S,
    HttpFleet,
    HttpReplica,
    Member,
    OpenReplica,
    ReplicaApp,
    ReplicaLostError,
)
from zlab.engine.server.replicas.router import serve_fleet

LOG = logging.getLogger("zlab.server")
POLL_S = 0.05
LAST_WORDS_S = 15.0  # for a replica to end by itself, once it is told to
ORPHAN_S = 5.0  # the same for a replica whose front is gone
RESTART_S, MAX_RESTART_S = 1.0, 60.0  # before a replica that ended too soon is started again
LONGEST_FOLDER = 60  # characters: the path of a Unix socket may have 107


@dataclass(frozen=True)
class ReplicaSettings:
    """How replicas are run.

    Attributes:
        num_replicas: how many.
        device: "cuda", each then has a GPU of its own, or "cpu".
    """

    num_replicas: int
    device: str

    def __post_init__(self) -> None:
        """Raise EngineError for settings that no replicas can have."""
        if self.num_replicas < 1:
            raise EngineError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.device not in ("cuda", "cpu"):
            raise EngineError(
                f"replicas run on 'cuda', a GPU each, or on 'cpu', not on {self.device!r}"
            )

    @property
    def on_gpu(self) -> bool:
        """Whether each replica has a GPU."""
        return self.device == "cuda"


def serve_replicas(
    open_replica: OpenReplica,
    replicas: ReplicaSettings,
    settings: ServerSettings,
    keys: Keys,
    address: tuple[str, int],
) -> int:
    """Start the replicas and serve until told to stop.

    Args:
        open_replica: opens the server of one replica; it must be possible to pickle it.
        replicas: how many, and where they run.
        settings: the front's bounds.
        keys: the front's keys.
        address: host and port to listen on.

    Returns:
        The exit code, as `zlab.engine.server.launch.Process` has it.

    Raises:
        EngineError: when the replicas do not start.
    """
    with local_replicas(open_replica, replicas) as fleet:
        return serve_fleet(fleet, settings, keys, address)


@contextlib.contextmanager
def local_replicas(
    open_replica: OpenReplica, settings: ReplicaSettings
) -> Iterator["ProcessFleet"]:
    """Start the replicas and wait until all listen; end them on leaving.

    Raises EngineError with the reason when one of them cannot be opened.
    """
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="zlab-replicas-", dir=None if short else "/tmp"))
    fleet = ProcessFleet(open_replica, settings, folder)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Start:
    """What a replica's process reads from its standard input."""

    open_replica: OpenReplica
    name: str
    socket: Path
    error: Path  # where it writes why it could not be opened
    num_threads: int | None  # of torch, for replicas that share a CPU
    parts_per_s: float


class ProcessFleet(HttpFleet):
    """The replicas of this machine."""

    def __init__(self, open_replica: OpenReplica, settings: ReplicaSettings, folder: Path) -> None:
        """Prepare; `start` starts the processes.

        Args:
            open_replica: opens the server of one replica.
            settings: how they are run.
            folder: for their sockets.

        Raises:
            EngineError: when there are fewer GPUs than replicas.
        """
        num_gpus = torch.cuda.device_count()
        if settings.on_gpu and num_gpus < settings.num_replicas:
            raise EngineError(
                f"{settings.num_replicas} replicas need a GPU each, there are {num_gpus}"
            )
        self._replicas = [
            _LocalReplica(open_replica, str(number), settings, folder)
            for number in range(settings.num_replicas)
        ]

    @property
    def num_wanted(self) -> int:
        """How many there should be."""
        return len(self._replicas)

    def start(self) -> None:
        """Start the processes and wait for them. Raises EngineError."""
        for replica in self._replicas:
            replica.start()
        waiting = list(self._replicas)
        while waiting:
            for replica in waiting:
                if replica.exit_code is not None:
                    raise EngineError(f"the replicas did not start: {replica.why_not_opened()}")
            waiting = [replica for replica in waiting if not replica.listens]
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the processes and wait for them."""
        for replica in self._replicas:
            replica.terminate()
        ends_s = time.monotonic() + LAST_WORDS_S
        for replica in self._replicas:
            replica.wait(ends_s - time.monotonic())

    async def members(self) -> Sequence[Member]:
        """Return the replicas that answer now; start those again that have ended."""
        found = await asyncio.gather(*(replica.member() for replica in self._replicas))
        return [member for member in found if member is not None]

    @override
    def reached(self) -> list[HttpReplica]:
        return [replica.http for replica in self._replicas]


class _LocalReplica:
    """One replica: its present process, and how to reach it."""

    def __init__(
        self, open_replica: OpenReplica, name: str, settings: ReplicaSettings, folder: Path
    ) -> None:
        self.name = name
        self._open_replica = open_replica
        self._settings = settings
        self._folder = folder
        self._num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._restart_s = RESTART_S
        self.http = HttpReplica(self._socket)

    @property
    def _socket(self) -> Path:
        return self._folder / f"{self.name}-{self._num_starts}.sock"

    @property
    def _error(self) -> Path:
        return self._socket.with_suffix(".error")

    @property
    def listens(self) -> bool:
        """Whether the process has opened its server."""
        return self._socket.exists()

    @property
    def exit_code(self) -> int | None:
        """The code that the process ended with; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process, on a new socket."""
        self._num_starts += 1
        self._started_s = time.monotonic()
        self.http = HttpReplica(self._socket)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        num_threads = None
        if self._settings.on_gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = visible.split(",") if visible else None
            number = int(self.name)
            environment["CUDA_VISIBLE_DEVICES"] = str(number) if gpus is None else gpus[number]
        else:
            num_threads = max(1, (os.cpu_count() or 1) // self._settings.num_replicas)
        start = _Start(
            self._open_replica,
            self.name,
            self._socket,
            self._error,
            num_threads,
            FRONT_PARTS_PER_S / self._settings.num_replicas,
        )
        # A session of its own: Ctrl-C reaches the front alone, which then ends the replicas.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import run_replica; run_replica()"],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code is looked at
            self._process.stdin.write(pickle.dumps(start))
            self._process.stdin.flush()

    def why_not_opened(self) -> str:
        """Return the reason that a process has left behind."""
        with contextlib.suppress(OSError):
            return self._error.read_text(encoding="utf-8")
        return f"replica {self.name} ended with exit code {self.exit_code}"

    async def member(self) -> Member | None:
        """Return the replica if it answers; start it again if it has ended."""
        if self.exit_code is not None:
            await self._restart()
        if not self.listens:
            return None
        try:
            return await self.http.member()
        except ReplicaLostError as error:
            LOG.warning("replica %s does not answer: %s", self.name, error)
            return None

    async def _restart(self) -> None:
        """Start again at once, or later if the process has ended soon after its start."""
        ran_s = time.monotonic() - self._started_s
        if ran_s < self._restart_s:
            return
        LOG.warning("replica %s ended with exit code %s: restarting", self.name, self.exit_code)
        lived = self.listens and ran_s > MAX_RESTART_S
        self._restart_s = RESTART_S if lived else min(2 * self._restart_s, MAX_RESTART_S)
        self.wait(0.0)
        await self.http.close()
        self._socket.unlink(missing_ok=True)
        self.start()

    def terminate(self) -> None:
        """Let the process end: it drains, and has no request any more."""
        if self._process is not None and self.exit_code is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process; kill it after that time."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            LOG.error("replica %s does not end: killed", self.name)
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def run_replica() -> None:
    """Serve one replica, in a process of its own, until told to stop or the front is gone."""
    start = pickle.load(sys.stdin.buffer)
    assert isinstance(start, _Start)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"replica {start.name}: %(levelname)s %(message)s",
    )
    processes: list[Process] = []
    threading.Thread(target=_end_with_front, args=(processes,), daemon=True).start()
    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    try:
        context, app = start.open_replica(start.name)
    except Exception as error:
        if not isinstance(error, ValueError):  # the errors of settings are, and say enough
            LOG.exception("the replica cannot be opened")
        start.error.write_text(str(error), encoding="utf-8")
        sys.exit(1)
    app = ReplicaApp(app, context, start.name, parts_per_s=start.parts_per_s)
    process = Process(app, context, uds=str(start.socket))
    processes.append(process)
    process.run()
    context.close(LAST_WORDS_S)
    sys.exit(process.exit_code)


def _end_with_front(processes: list[Process]) -> None:
    """Stop when standard input ends, which the front holds open as long as it lives."""
    # Without the lock of `sys.stdin`, which would still be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    for process in processes:
        process.stop_soon()
        time.sleep(ORPHAN_S)
    os._exit(1)
