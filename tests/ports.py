"""A port for a server that a test starts."""

import errno
import random
import socket
from pathlib import Path

LEAST_PORT, MOST_PORT = 10_000, 65_535
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of Linux


def free_port() -> int:
    """A port of this machine that no server listens on now.

    It lies outside the range from which the system takes ports for clients and for servers that ask
    for any: only a server that asks for this very port could take it before the caller does.
    """
    system = random.SystemRandom()  # tests that run side by side may share a seed
    for port in system.sample(_ports(), 200):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise RuntimeError("200 ports were tried, and a server listens on each of them")


def _ports() -> list[int]:
    every = range(LEAST_PORT, MOST_PORT + 1)
    if not EPHEMERAL.is_file():
        return list(every)
    first, last = map(int, EPHEMERAL.read_text("ascii").split())
    return [port for port in every if not first <= port <= last] or list(every)
