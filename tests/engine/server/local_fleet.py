"""Replicas in this process, behind real HTTP on Unix sockets, and a client that speaks ASGI.

`Place` is a front over small applications, each of which can be told to refuse, to say nothing, or
to die.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.server import ServerState

from zlab.engine.server.context import ServerSettings
from zlab.engine.server.middleware import Keys
from zlab.engine.server.replicas.fleet import HttpFleet, HttpReplica, Member
from zlab.engine.server.replicas.router import ReplicaRouter, ReplicaSet

BLOCK_SIZE = 4
ADMIN_KEY = "the-admin-key"
BOUND_S = 240.0  # for anything awaited; nothing takes near as long, not on a busy machine either


class HttpServer:
    """An application on a Unix socket, served on the running event loop, that can be cut off."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
        self._config.load()
        self._state = ServerState()
        self._path = path
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Listen, if that has not begun."""
        if self._server is None:
            make: Any = self._config.http_protocol_class
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                lambda: make(config=self._config, server_state=self._state, app_state={}),
                str(self._path),
            )

    def cut_off(self) -> None:
        """Break every connection, as the end of the process would."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()


class Application:
    """Answers `/v1/completions` with its name: at once, or as a stream that goes on when told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.policy = "first"
        self.before = ""  # the policy before the last change
        self.refuses = 0  # status with which a change is refused, 0: none
        self.keeps = False  # a change is not taken back
        self.dies: Callable[[], None] | None = None  # called when a change comes
        self.silent = False  # it takes requests and answers none
        self.num_asked = 0
        self.num_left = 0  # requests whose client went
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if scope["path"] != "/v1/completions":
            await self._state(scope, body, send)
            return
        self.num_asked += 1
        fields = json.loads(body)
        if fields.get("fail"):
            await _send_json(send, 500, {"error": {"code": "internal_error"}})
            return
        leaving = asyncio.ensure_future(receive())
        if self.silent:
            await leaving
            self.num_left += 1
            return
        if not fields.get("stream"):
            await _send_json(send, 200, {"replica": self.name})
            leaving.cancel()
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        await send(
            {
                "type": "http.response.body",
                "body": f"data: {self.name}\n\n".encode(),
                "more_body": True,
            }
        )
        going = asyncio.create_task(self.go_on.wait())
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if leaving.done():
            self.num_left += 1
            return
        leaving.cancel()
        if fields.get("breaks"):
            raise RuntimeError("a fault of the application")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _state(self, scope: Scope, body: bytes, send: Send) -> None:
        match scope["path"], scope["method"]:
            case "/health", "GET":
                await _send_json(send, 200, {"status": "ok"})
            case "/metrics", "GET":
                page = (
                    f"# HELP asked_total Requests.\n# TYPE asked_total counter\nasked_total "
                    f"{self.num_asked}\n"
                )
                await _send(send, 200, page.encode())
            case "/v1/policy", "GET":
                await _send_json(send, 200, {"lanes": [self._lane()]})
            case "/v1/policy", "POST" if self.dies is not None:
                self.dies()
                await asyncio.Event().wait()
            case "/v1/policy", "POST" if self.refuses:
                await _send_json(
                    send, self.refuses, {"error": {"message": f"{self.name} does not want to"}}
                )
            case "/v1/policy", "POST":
                self.before, self.policy = self.policy, json.loads(body)["policy"]
                await _send_json(send, 200, self._lane())
            case "/v1/policy/undo", "POST" if self.keeps:
                await _send_json(send, 503, {"error": {"message": f"{self.name} is busy"}})
            case "/v1/policy/undo", "POST":
                assert json.loads(body) == {"lane": "live", "digest": self._lane()["digest"]}
                self.policy = self.before
                await _send_json(send, 200, self._lane())
            case "/v1/models", "GET":
                await _send_json(send, 200, {"model": "small"})
            case _:
                await _send_json(send, 404, {"error": {"message": "Not Found"}})

    def _lane(self) -> dict[str, str]:
        return {
            "lane": "live",
            "policy": self.policy,
            "digest": self.policy[::-1],
            "toml": self.policy,
        }


async def _send(send: Send, status: int, body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_json(send: Send, status: int, body: Any) -> None:
    await _send(send, status, json.dumps(body).encode())


class LocalFleet(HttpFleet):
    """Applications by id, each of which can die."""

    def __init__(self, num_wanted: int) -> None:
        self.num_wanted = num_wanted
        self.apps: dict[str, Application] = {}
        self.troubles: dict[str, str] = {}
        self.shares_prefixes = True
        self._folder = Path(tempfile.mkdtemp(prefix="zlab-"))
        self._servers: dict[str, HttpServer] = {}
        self._https: dict[str, HttpReplica] = {}
        for number in range(num_wanted):
            self.start(str(number))

    def start(self, name: str) -> Application:
        """A replica of that name; the id is the name and how many there have been."""
        id = f"{name}-{len(self._https)}"
        path = self._folder / id
        self.apps[id] = Application(name)
        self._servers[id] = HttpServer(self.apps[id], path)
        self._https[id] = HttpReplica(path)
        self._https[id].member_id = id
        return self.apps[id]

    def kill(self, id: str) -> None:
        """It is gone, and with it every answer that has not been given."""
        del self.apps[id]
        self._servers[id].cut_off()

    def of(self, name: str) -> tuple[str, Application]:
        """Id and application of the replica of that name."""
        return next((id, app) for id, app in self.apps.items() if app.name == name)

    @override
    def reached(self) -> Iterator[HttpReplica]:
        yield from self._https.values()

    async def members(self) -> Sequence[Member]:
        for id in self.apps:
            await self._servers[id].listen()
        return [
            Member(id, app.name, 0, BLOCK_SIZE, 64, self.shares_prefixes, self.troubles.get(id))
            for id, app in self.apps.items()
        ]

    async def end(self) -> None:
        """Close everything."""
        await self.close()
        for server in self._servers.values():
            server.cut_off()
        shutil.rmtree(self._folder)


class Call:
    """One request to an application as a server would make it."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]],
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.takes = asyncio.Event()  # cleared: the client reads nothing
        self.takes.set()
        self._gone = asyncio.Event()
        self._news = asyncio.Condition()
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        self._messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [
                (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
            ],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this holds of what has come."""
        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(condition)

    async def done(self) -> "Call":
        """Wait for the application to be through with it."""
        await asyncio.wait_for(self.task, BOUND_S)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The code of the error that came."""
        code = self.json["error"]["code"]
        assert isinstance(code, str)
        return code

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.takes.wait()
        async with self._news:
            if message["type"] == "http.response.start":
                assert self.status is None
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                assert not self.complete
                self.body += message.get("body", b"")
                self.complete = not message.get("more_body", False)
            self._news.notify_all()


class Place:
    """A front over local replicas."""

    def __init__(
        self,
        num_replicas: int = 2,
        settings: ServerSettings | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.fleet = LocalFleet(num_replicas)
        self.replica_set = ReplicaSet(self.fleet)
        self.front = ReplicaRouter(
            self.replica_set, settings or ServerSettings(), keys or Keys.of(admin=[ADMIN_KEY])
        )
        self.front.worker.listen()

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Call:
        return Call(self.front, method, path, body, headers)

    async def get(self, path: str) -> Call:
        return await self.call("GET", path).done()

    async def change(self, policy: str) -> Call:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return await self.call("POST", "/v1/policy", {"policy": policy}, headers).done()

    async def complete(self, prompt: Any, **fields: Any) -> Call:
        return await self.call("POST", "/v1/completions", {"prompt": prompt, **fields}).done()

    def stream(self, prompt: Any, **fields: Any) -> Call:
        return self.call("POST", "/v1/completions", {"prompt": prompt, "stream": True, **fields})


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until this holds."""
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.001)
