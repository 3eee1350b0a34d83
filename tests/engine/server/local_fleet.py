"""Replicas in this process: small applications that say what happens to them, and a client that speaks ASGI."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from engine.server.keys import Keys
from engine.server.replicas_call import Forwarded, Part, answer
from engine.server.replicas_fleet import Member, ReplicaLostError
from engine.server.replicas_front import Front
from engine.server.replicas_roster import Roster
from engine.server.settings import ServerSettings

BLOCK_SIZE = 4
ADMIN_KEY = "the-admin-key"
BOUND_S = 20.0  # for anything awaited; nothing takes near as long


class Application:
    """Answers `/v1/completions` with its name: at once, or as a stream that goes on when told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.policy = "first"
        self.before = ""  # the policy before the last change
        self.refuses = 0  # status with which a change is refused, 0: none
        self.keeps = False  # a change is not taken back
        self.dies: Callable[[], None] | None = None  # called when a change comes
        self.silent = False  # it takes requests and says nothing
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
            raise RuntimeError("a fault of the application")
        leaving = asyncio.ensure_future(receive())
        if self.silent:
            await leaving
            self.num_left += 1
            return
        if not fields.get("stream"):
            await _send_json(send, 200, {"replica": self.name})
            leaving.cancel()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": f"data: {self.name}\n\n".encode(), "more_body": True})
        going = asyncio.create_task(self.go_on.wait())
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if leaving.done():
            self.num_left += 1
            return
        leaving.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _state(self, scope: Scope, body: bytes, send: Send) -> None:
        match scope["path"], scope["method"]:
            case "/health", "GET":
                await _send_json(send, 200, {"status": "ok"})
            case "/metrics", "GET":
                page = f"# HELP asked_total Requests.\n# TYPE asked_total counter\nasked_total {self.num_asked}\n"
                await _send(send, 200, page.encode())
            case "/v1/policy", "GET":
                await _send_json(send, 200, {"lanes": [self._lane()]})
            case "/v1/policy", "POST" if self.dies is not None:
                self.dies()
                await asyncio.Event().wait()
            case "/v1/policy", "POST" if self.refuses:
                await _send_json(send, self.refuses, {"error": {"message": f"{self.name} does not want to"}})
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
        return {"lane": "live", "policy": self.policy, "digest": self.policy[::-1], "toml": self.policy}


async def _send(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_json(send: Send, status: int, body: Any) -> None:
    await _send(send, status, json.dumps(body).encode())


class LocalFleet:
    """Applications by id, each of which can die."""

    def __init__(self, num_wanted: int) -> None:
        self.num_wanted = num_wanted
        self.apps: dict[str, Application] = {}
        self.troubles: dict[str, str] = {}
        self.shares_prefixes = True
        self._deaths: dict[str, asyncio.Event] = {}
        for number in range(num_wanted):
            self.start(str(number))

    def start(self, name: str) -> Application:
        """A replica of that name; the id is the name and how many there have been."""
        id = f"{name}-{len(self._deaths)}"
        self.apps[id] = Application(name)
        self._deaths[id] = asyncio.Event()
        return self.apps[id]

    def kill(self, id: str) -> None:
        """It is gone, and with it every answer that has not been given."""
        del self.apps[id]
        self._deaths[id].set()

    def of(self, name: str) -> tuple[str, Application]:
        """Id and application of the replica of that name."""
        return next((id, app) for id, app in self.apps.items() if app.name == name)

    async def members(self) -> Sequence[Member]:
        return [
            Member(id, app.name, 0, BLOCK_SIZE, 64, self.shares_prefixes, (), self.troubles.get(id))
            for id, app in self.apps.items()
        ]

    async def forward(self, request: Forwarded, replica: str) -> AsyncGenerator[Part]:
        if replica not in self.apps:
            raise ReplicaLostError("it is gone")
        async with aclosing(answer(self.apps[replica], request, lambda: 0.0)) as parts:
            while True:
                coming = asyncio.ensure_future(anext(parts, None))
                dying = asyncio.ensure_future(self._deaths[replica].wait())
                try:
                    await asyncio.wait((coming, dying), return_when=asyncio.FIRST_COMPLETED)
                    if not coming.done():
                        raise ReplicaLostError("it has died")
                    part = coming.result()
                finally:
                    dying.cancel()
                    coming.cancel()
                    await asyncio.gather(coming, dying, return_exceptions=True)
                if part is None:
                    return
                yield part


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
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self._messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
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

    def __init__(self, num_replicas: int = 2, settings: ServerSettings | None = None, keys: Keys | None = None) -> None:
        self.fleet = LocalFleet(num_replicas)
        self.roster = Roster(self.fleet)
        self.front = Front(self.roster, settings or ServerSettings(), keys or Keys.of(admin=[ADMIN_KEY]))
        self.front.worker.loop = asyncio.get_running_loop()

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Call:
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
