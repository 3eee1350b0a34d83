"""Who may come in: API keys and a separate admin key, from the environment or a file, compared in constant time."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError
from engine.server.errors import ApiError
from engine.server.sending import send_error

LEAST_KEY_CHARACTERS = 8
BEARER = "bearer "
GUARDED = "/v1/"  # below it a key is needed
ADMIN_PATHS = ("/v1/policy", "/v1/admin")  # to look needs either key, to change anything the admin key


@dataclass(frozen=True)
class Keys:
    """Digests of the keys; the keys themselves are not kept. Without `api` everyone may ask, without `admin` none may
    change anything.
    """

    api: tuple[bytes, ...] = field(default=(), repr=False)
    admin: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def of(api: list[str] | None = None, admin: list[str] | None = None) -> "Keys":
        """From the keys. Raises EngineError for one that is short or serves as both."""
        for kind, keys in (("API", api or []), ("admin", admin or [])):
            if any(len(key) < LEAST_KEY_CHARACTERS for key in keys):
                raise EngineError(f"an {kind} key must have at least {LEAST_KEY_CHARACTERS} characters")
        if set(api or ()) & set(admin or ()):
            raise EngineError("the admin key must be another than the API key")
        return Keys(tuple(map(_digest, api or ())), tuple(map(_digest, admin or ())))

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError when the request lacks the key that it needs: 401, or 403 where there is no admin key."""
        if not path.startswith(GUARDED):
            return
        administers = path.startswith(ADMIN_PATHS)
        if administers and method not in ("GET", "HEAD", "OPTIONS"):
            if not self.admin:
                raise ApiError(403, "this server was started without an admin key", code="no_admin_key")
            if not _among(headers, self.admin):
                raise _unauthorised("admin key", "invalid_admin_key")
        elif self.api and not _among(headers, self.api + (self.admin if administers else ())):
            raise _unauthorised("API key", "invalid_api_key")


class KeyCheck:
    """ASGI middleware: a request without the key that it needs is refused before its body is read."""

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
    """Keys of an environment variable, or of a file with one a line; none where neither is there.

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
    return ApiError(401, f"missing or wrong {what}", code=code, headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _among(headers: Mapping[str, str], digests: tuple[bytes, ...]) -> bool:
    value = headers.get("authorization", "")
    given = _digest(value[len(BEARER) :].strip()) if value[: len(BEARER)].lower() == BEARER else b""
    return sum(hmac.compare_digest(given, digest) for digest in digests) > 0  # looks at all of them
