"""What a request passes before its body is parsed: API keys, a body limit, a concurrency limit.

KeyCheck      401 or 403 before the body is read
BodyLimit     413 for a body that is too large, 408 for one that is too slow
ConcurrencyLimit.enter()   429 when too many requests are under way, 503 while draining
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zlab.engine.errors import EngineError
from zlab.engine.server.protocol import ApiError, overloaded, send_error, unavailable

CLOSE = {"Connection": "close"}  # the rest of the request is not read


class ConcurrencyLimit:
    """Counts the requests under way and bounds their number; belongs to the event loop's thread.

    Attributes:
        num_active: the requests under way.
        closed: no further request may enter; set by `close`.
    """

    def __init__(self, max_concurrent: int, retry_after_s: Callable[[], int]) -> None:
        self._max_concurrent = max_concurrent
        self._retry_after_s = retry_after_s
        self.num_active = 0
        self.closed = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request while it is under way. Raises ApiError, 429 or 503, if none may enter."""
        if self.closed:
            raise unavailable("the server is shutting down", "shutting_down", self._retry_after_s())
        if self.num_active >= self._max_concurrent:
            message = (
                f"{self.num_active} requests are under way, the limit is {self._max_concurrent}"
            )
            raise overloaded(message, self._retry_after_s(), "too_many_requests")
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def close(self) -> None:
        """Let no further request enter."""
        self.closed = True


class BodyLimit:
    """ASGI middleware that refuses a body that is too large or too slow.

    The header is enough for a 413; without a header, the body is counted as it comes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await send_error(send, self._too_large())
            return
        num_bytes, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._timeout_s

        async def limited_receive() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # only the client's disconnect can come
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._timeout_s:g} s"
                raise ApiError(408, late, code="body_timeout", headers=CLOSE) from None
            num_bytes += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large", headers=CLOSE)


MIN_KEY_CHARACTERS = 8
BEARER = "bearer "
OPEN_PATHS = ("/health", "/metrics")  # they say nothing of any request; all others need a key
# Reading these paths takes an API key or an admin key, changing anything takes an admin key.
ADMIN_PATHS = ("/v1/policy", "/v1/admin")


@dataclass(frozen=True)
class Keys:
    """Digests of the keys; the keys themselves are not kept.

    Without API keys no key is needed; without admin keys nothing can be changed.
    """

    api: tuple[bytes, ...] = field(default=(), repr=False)
    admin: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def of(api: list[str] | None = None, admin: list[str] | None = None) -> "Keys":
        """Build from the keys. Raises EngineError for one that is short or serves as both."""
        for kind, keys in (("API", api or []), ("admin", admin or [])):
            if any(len(key) < MIN_KEY_CHARACTERS for key in keys):
                raise EngineError(
                    f"an {kind} key must have at least {MIN_KEY_CHARACTERS} characters"
                )
        if set(api or ()) & set(admin or ()):
            raise EngineError("the admin key must be another than the API key")
        return Keys(tuple(map(_digest, api or ())), tuple(map(_digest, admin or ())))

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Check that the request has the key that it needs.

        Args:
            method: the HTTP method.
            path: the path, without query.
            headers: the headers, by lower-case name.

        Raises:
            ApiError: 401, or 403 where the server has no admin key.
        """
        if path in OPEN_PATHS:
            return
        is_admin = path.startswith(ADMIN_PATHS)
        if is_admin and method not in ("GET", "HEAD", "OPTIONS"):
            if not self.admin:
                raise ApiError(
                    403, "this server was started without an admin key", code="no_admin_key"
                )
            if not _has_key(headers, self.admin):
                raise _unauthorised("admin key", "invalid_admin_key")
        elif self.api and not _has_key(headers, self.api + (self.admin if is_admin else ())):
            raise _unauthorised("API key", "invalid_api_key")


class KeyCheck:
    """ASGI middleware that refuses a request without the key that it needs, its body unread."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            try:
                self._keys.check(scope["method"], scope["path"], Headers(scope=scope))
            except ApiError as error:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


def read_keys(env: str, file: Path | None) -> list[str]:
    """Read keys from a file with one a line, or from an environment variable; none if unset.

    Raises EngineError for a file that cannot be read or holds none.
    """
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"no keys can be read from {file}: {type(error).__name__}") from error
        if not lines:
            raise EngineError(f"{file} holds no key")
        return lines
    value = os.environ.get(env, "").strip()
    return [value] if value else []


def _unauthorised(what: str, code: str) -> ApiError:
    return ApiError(
        401, f"missing or wrong {what}", code=code, headers={"WWW-Authenticate": "Bearer"}
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _has_key(headers: Mapping[str, str], digests: tuple[bytes, ...]) -> bool:
    """Compare with every digest, in constant time."""
    value = headers.get("authorization", "")
    given = _digest(value[len(BEARER) :].strip()) if value[: len(BEARER)].lower() == BEARER else b""
    return sum(hmac.compare_digest(given, digest) for digest in digests) > 0
