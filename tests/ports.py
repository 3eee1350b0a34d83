"""A port for a server that a test starts."""

import socket


def free_port() -> int:
    """A port of this machine that nobody listens on now; somebody may be faster to take it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
