"""Refusals of requests: OpenAI's error body under an HTTP status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpRefusal(Exception):
    """A request that is not served. status: of HTTP; param: the field of the body that is to blame; code: in a word."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str]

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body(), ensure_ascii=False).encode()
