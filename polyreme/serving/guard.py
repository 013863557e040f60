"""The guard before the endpoints: who may ask, from where, and how large a body may be."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError
from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.service import ServiceLimits
from polyreme.serving.web import Response

OPEN = ("/health",)
"""Paths that need no key: what watches a server has none."""
_SOUNDS = "/v1/audio/"
"""Paths of requests that bring a sound begin so."""
_DROPPED_BODIES = 16
"""Bodies of the longest size that is taken, after so many of which a client that was refused is not heard out."""
_LOCAL = ("localhost", "127.0.0.1", "[::1]")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Access:
    """keys: SHA-256 digests of those that may ask, none for everybody. origins: of pages, beside the server's own,
    whose scripts may ask. hosts: names that the server may be called by, None for any; a page of another site whose
    name was turned to this machine calls it by that name."""

    keys: tuple[bytes, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, host: str, key_file: Path | None = None, origins: Sequence[str] = (), *, is_insecure: bool = False
    ) -> Access:
        """The access to a server that listens on a host. Raises ConfigError for one that others reach without a key."""
        keys = () if key_file is None else read_keys(key_file)
        if not keys and not is_insecure and not is_local(host):
            raise ConfigError(
                f"--host {host} is reached from other machines; give --api-key-file, or --insecure if anybody may ask"
            )
        for origin in origins:
            if origin.count("/") != 2 or not origin.startswith(("http://", "https://")):
                raise ConfigError(f"--allow-origin {origin}: give a scheme and a host, such as https://example.org")
        hosts = None if keys or not is_local(host) else (*_LOCAL, host)
        return cls(keys, tuple(origins), hosts)


def is_local(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one a line. Raises ConfigError for a file without one."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: not a readable file of ASCII ({type(error).__name__})") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or any(" " in key for key in keys):
        raise ConfigError(f"--api-key-file {path}: give a key on each line, without spaces; `openssl rand -hex 32`")
    return tuple(_digest(key.encode()) for key in keys)


class Guard:
    """An ASGI application around another one. Bodies are read here, whole, before anything is done with them."""

    def __init__(self, app: Any, access: Access, limits: ServiceLimits) -> None:
        self._app, self._access, self._limits = app, access, limits

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        try:
            self._check_head(scope)
            self._check_origin(headers)
            if scope["method"] == "OPTIONS" and origin in self._access.origins:
                await Response(status_code=204, headers=_preflight(origin))(scope, receive, send)
                return
            if scope["path"] not in OPEN:
                self._check_key(headers, scope["path"])
            body = await self._body(scope["path"], headers, receive)
        except HttpRefusal as refusal:
            await self._refuse(refusal, receive, send)
            return
        await self._app(scope, _replayed(body, receive), _with_origin(send, origin, self._access.origins))

    def _check_head(self, scope: Any) -> None:
        # h11 refuses one that is not whole by then; a read may bring more
        length = len(scope["raw_path"]) + len(scope["query_string"])
        length += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        if length > self._limits.header_bytes:
            raise HttpRefusal(431, "the head of the request is too long", code="bad_request")

    def _check_origin(self, headers: Mapping[bytes, str]) -> None:
        host = headers.get(b"host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self._access.hosts is not None and name not in self._access.hosts:
            raise HttpRefusal(
                403,
                f"called as {host[:200]!r}, which is not a name of this server; call it localhost, or give it a key",
                code="host",
            )
        origin = headers.get(b"origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}", *self._access.origins):
            raise HttpRefusal(
                403, f"asked by a page of {origin[:200]!r}; the server's --allow-origin lets one ask", code="origin"
            )

    def _check_key(self, headers: Mapping[bytes, str], path: str) -> None:
        if not self._access.keys:
            return
        digest = _digest(_key_of(headers.get(b"authorization", "")))
        # all are compared, so that time does not tell which one is near
        if sum(hmac.compare_digest(digest, key) for key in self._access.keys):
            return
        # a browser asks its user for the key of a page
        scheme = 'Basic realm="polyreme", charset="UTF-8"' if path == "/" or path.startswith("/page/") else "Bearer"
        raise HttpRefusal(
            401,
            "a key is needed that the server knows: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": scheme},
        )

    async def _refuse(self, refusal: HttpRefusal, receive: Receive, send: Send) -> None:
        """Answer, drop what the client still sends of its body, and close.

        A connection that is closed on unread bytes is reset, and a client that sends a long body then never sees why it
        was refused. What is dropped has bounds too, so that nobody sends for ever.
        """
        body = refusal.encoded()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= refusal.headers
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if refusal.status != 408:  # who was too slow does not get more time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.body_seconds):
                    await _drop_body(receive, _DROPPED_BODIES * self._limits.body_bytes)
        await send({"type": "http.response.body", "body": b""})

    async def _body(self, path: str, headers: Mapping[bytes, str], receive: Receive) -> bytes:
        coding = headers.get(b"content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise HttpRefusal(
                415, f"Content-Encoding {coding[:50]!r}: bodies are read as they are; send it without", code="encoding"
            )
        most = self._limits.sound_bytes if path.startswith(_SOUNDS) else self._limits.body_bytes
        seconds = self._limits.body_seconds
        too_long = HttpRefusal(413, f"the body has over {most} bytes, the server's limit", code="body_too_long")
        if int(headers.get(b"content-length", 0)) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return bytes(body)
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_long
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise HttpRefusal(408, f"the body was not there within {seconds:g} seconds", code="timeout") from None


async def _drop_body(receive: Receive, most: int) -> None:
    """Read the rest of a body, up to so many bytes, and keep nothing of it."""
    left = most
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_of(authorization: str) -> bytes:
    """The key of a header: a bearer's, or the password that a browser asked for."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return rest.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _replayed(body: bytes, receive: Receive) -> Receive:
    is_read = False

    async def replay() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _preflight(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }


def _with_origin(send: Send, origin: str | None, allowed: Sequence[str]) -> Send:
    if origin is None or origin not in allowed:
        return send
    extra = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    async def allow(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return allow
