"""A server that answers `/v1/policy` as it is told to: agrees, refuses, says nothing, or
disagrees.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.zlab.command_line import PATIENCE_S

KEY = "admin-key-of-a-test"


@dataclass
class PolicyServer:
    """What it does and what it has seen.

    Attributes:
        mode: of its POST: "agree", "refuse" (with 409), "mute" (does it, breaks off), "deaf"
        (breaks off without doing
            it), "lost" (as "deaf", and nothing answers any more), "other" (says that it runs
            another policy), "gateway" (504), "move" (a redirect), "hold" (waits for `release`).
        lanes: lane -> digest of what it runs.
        posts: bodies of the POSTs.
        elsewhere: whether anything came to the address that "move" names.
        is_gone: whether a "lost" one has had its POST.
    """

    url: str = ""
    mode: str = "agree"
    lanes: dict[str, str] = field(default_factory=lambda: {"live": "0" * 64})
    posts: list[dict[str, Any]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    elsewhere: bool = False
    is_gone: bool = False

    def apply(self, body: Mapping[str, Any]) -> None:
        """Run what was sent."""
        self.lanes[body["lane"]] = (
            body["digest"] if body["policy"] is not None else self.lanes["live"]
        )


@contextmanager
def policy_server() -> Iterator[PolicyServer]:
    """One on a free port of this machine."""
    state = PolicyServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def answer(self, status: int, body: Any, **headers: str) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(ConnectionError):  # a client that was killed
                self.wfile.write(content)

        def allowed(self) -> bool:
            if self.headers["Authorization"] == f"Bearer {KEY}":
                return True
            self.answer(401, {"error": {"message": "no such key"}})
            return False

        def do_GET(self) -> None:
            if self.path != "/v1/policy":
                state.elsewhere = True
            if state.mode == "lost" and state.is_gone:
                self.close_connection = True
            elif self.allowed():
                self.answer(
                    200,
                    {
                        "lanes": [
                            {"lane": lane, "digest": runs} for lane, runs in state.lanes.items()
                        ]
                    },
                )

        def do_POST(self) -> None:
            if not self.allowed():
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.posts.append(body)
            state.asked.set()
            match state.mode:
                case "agree" | "hold":
                    if state.mode == "hold":
                        state.release.wait(PATIENCE_S)
                    state.apply(body)
                    self.answer(200, {"lane": body["lane"], "digest": state.lanes[body["lane"]]})
                case "refuse":
                    self.answer(409, {"error": {"message": "a budget of 9 blocks does not fit"}})
                case "gateway":
                    self.answer(504, {})
                case "other":
                    self.answer(200, {"lane": body["lane"], "digest": "1" * 64})
                case "move":
                    self.answer(307, {}, Location=f"{state.url}/elsewhere")
                case "mute":
                    state.apply(body)
                    self.close_connection = True
                case _:
                    state.is_gone = state.mode == "lost"
                    self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
