"""Answers that come bit by bit, and clients that leave before they are there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.web import Response

Result = TypeVar("Result")
_PING_SECONDS = 15.0
"""Proxies close a connection on which nothing comes for some time; many take 30 or 60 seconds."""
_log = logging.getLogger("polyreme.serving")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was there, or takes nothing of it any more."""


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled when the client leaves. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of JSON, then [DONE]; is_named: each under its type, and nothing after them.

    events: bodies; None at first says that the request was taken, as a HttpRefusal before it has a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any] | None], send_seconds: float, *, is_named: bool = False
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._send_seconds, self._is_named = events, send_seconds, is_named

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            try:
                async with asyncio.timeout(self._send_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError from None

        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._send(send_in_time))

    async def _send(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async with contextlib.aclosing(self._events) as events:
            await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings = asyncio.ensure_future(_ping(send))
            try:
                async for event in events:
                    name = f"event: {event['type']}\n".encode() if self._is_named and event else b""
                    await send(_part(name + b"data: " + as_json(event) + b"\n\n"))
                if not self._is_named:
                    await send(_part(b"data: [DONE]\n\n"))
            except HttpRefusal as refusal:
                _log.warning("a stream ended early: %s", refusal)
                await send(_part(b"data: " + refusal.encoded() + b"\n\n"))
            finally:
                pings.cancel()
            await send(_part(b"", more=False))


def as_json(body: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _ping(send: Callable[[Any], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_PING_SECONDS)
        with contextlib.suppress(ClientGoneError):  # the stream learns of it as well
            await send(_part(b": still here\n\n"))
