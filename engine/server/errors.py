"""What a client is told when its request is not served: a status, and the error object of the OpenAI API."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """The root of everything a client can be told; `param` names the field of its request, `code` is for programs.

    It is an HTTPException so that frameworks hand it on wherever it is raised, also while they read a body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the OpenAI API answers with."""
        kind = KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int, code: str) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """A 503: the server cannot serve now."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code=code, headers=headers)
