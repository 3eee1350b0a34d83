"""Asking a running server which policy it runs, and telling it to run another: `GET` and `POST
/v1/policy`.

The plain client of the standard library: no redirect is followed and no proxy used, so the admin
key goes to the named server and nowhere else.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from zlab.cli.console import MisuseError
from zlab.policies.registry import DeploymentStage, StageChange
from zlab.policies.snapshot import PolicySnapshot

KEY_NAME = "ZLAB_ADMIN_KEY"
PATH = "/v1/policy"
CONNECT_S = 5.0
ANSWER_S = 20.0
MOST_BYTES = 4 << 20
OF_A_PROXY = (502, 504)  # somebody between us and the server does not know what it did


class LiveError(OSError):
    """A server that did not do what it was asked."""


class RefusedByServerError(LiveError):
    """It said no, or could not be reached: nothing was changed there."""


class SilentError(LiveError):
    """It did not answer, or not so that one could tell: nobody knows whether it did."""


@dataclass(frozen=True)
class Address:
    """Where a server is: its address as given, and that taken apart."""

    url: str
    is_secure: bool
    host: str
    port: int | None  # None: that of the scheme
    path: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raise MisuseError on an address that is none, without repeating one that may have a key
        in it.
        """
        if "@" in url:  # also where nothing can be made of the rest
            raise MisuseError(
                f"--live: no key in the address; put it into ${KEY_NAME} or --admin-key-file"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise MisuseError(f"--live {url}: {error}") from error
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
        ):
            raise MisuseError(f"--live {url}: must be an address as http://127.0.0.1:8000")
        return cls(
            url.rstrip("/"),
            parts.scheme == "https",
            parts.hostname,
            port,
            parts.path.rstrip("/") + PATH,
        )


class LiveServer:
    """A server by its address, with the key of its administrator."""

    def __init__(self, at: Address, key: str) -> None:
        self._at = at
        self._key = key

    @property
    def url(self) -> str:
        """Its address as given, without a slash at the end."""
        return self._at.url

    @property
    def shows_key(self) -> bool:
        """Whether the key travels over a network that others may read."""
        if self._at.is_secure or self._at.host == "localhost":
            return False
        try:
            return not ip_address(self._at.host).is_loopback
        except ValueError:
            return True

    def running(self, lane: DeploymentStage) -> str | None:
        """Digest of the policy that a lane runs; of the canary None where it runs what is live.
        Raises LiveError.
        """
        answer = self._ask("GET", None)
        lanes = answer.get("lanes")
        if not isinstance(lanes, list) or not all(isinstance(row, dict) for row in lanes):
            raise SilentError(f"{self.url}: its answer to GET {PATH} names no lanes")
        digests = {str(row.get("lane")): row.get("digest") for row in lanes}
        found = digests.get(lane)
        return (
            None
            if found is None
            or (lane is DeploymentStage.CANARY and found == digests.get(DeploymentStage.LIVE))
            else str(found)
        )

    def carry_out(
        self,
        change: StageChange,
        policy: PolicySnapshot,
        setup: Mapping[str, str | int] | None = None,
    ) -> None:
        """Tell it of a change; it runs when this returns. It refuses where its own setup is not
        that of `setup`. Raises RefusedError or SilentError.
        """
        ends = change.to_stage is DeploymentStage.RETIRED
        answer = self._ask(
            "POST",
            {
                "lane": change.lane,
                "policy": None if ends else policy.toml,
                "sources": {} if ends else dict(policy.sources),
                "name": None if ends else policy.name,
                "digest": None if ends else policy.digest,
                "who": change.who,
                "why": change.why,
                "evidence": change.evidence,
                "change": change.number,
                **({} if setup is None else {"setup": dict(setup)}),
            },
        )
        if not ends and answer.get("digest") != policy.digest:
            raise SilentError(
                f"{self.url}: asked to run policy {policy.digest[:12]}, it says "
                f"{answer.get('digest')!r}"
            )

    def _ask(self, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer as an object. Raises LiveError."""
        kind = HTTPSConnection if self._at.is_secure else HTTPConnection
        connection = kind(self._at.host, self._at.port, timeout=CONNECT_S)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            try:
                connection.connect()
            except OSError as error:
                raise RefusedByServerError(f"{self.url}: cannot be reached: {error}") from error
            if isinstance(connection.sock, socket.socket):
                connection.sock.settimeout(ANSWER_S)
            try:
                connection.request(
                    method, self._at.path, json.dumps(body) if body is not None else None, headers
                )
                response = connection.getresponse()
                status, content = response.status, response.read(MOST_BYTES)
            except (OSError, HTTPException) as error:
                raise SilentError(
                    f"{self.url}: no answer to {method} {PATH}: {error or type(error).__name__}"
                ) from error
        finally:
            connection.close()
        return self._understood(method, status, content)

    def _understood(self, method: str, status: int, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not 200 <= status < 300:
            error = answer.get("error") if isinstance(answer, dict) else None
            words = error.get("message") if isinstance(error, dict) else None
            message = (
                f"{self.url}: {method} {PATH} was answered with {status}: "
                f"{words or 'no reason given'}"
            )
            raise SilentError(message) if status in OF_A_PROXY else RefusedByServerError(message)
        if not isinstance(answer, dict):
            raise SilentError(f"{self.url}: its answer to {method} {PATH} is no JSON object")
        return answer


def open_server(url: str, key_file: Path | None) -> LiveServer:
    """The server at the address, with the key of the file, or of the environment.

    Raises MisuseError on an address that is none, then without a key.
    """
    at = Address.of(url)
    key = (
        key_file.read_text("utf-8").strip()
        if key_file is not None
        else os.environ.get(KEY_NAME, "").strip()
    )
    if not key:
        where = (
            f"{key_file} is empty"
            if key_file is not None
            else f"set ${KEY_NAME} or give --admin-key-file FILE"
        )
        raise MisuseError(f"--live {url} needs the server's admin key: {where}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise MisuseError("the admin key must be one word of printable ASCII letters")
    return LiveServer(at, key)
