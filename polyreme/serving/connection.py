"""One connection of HTTP/1.1: a request's head has a time and a length, and what is no HTTP gets an error body."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from polyreme.serving.refusals import HttpRefusal
from polyreme.serving.web import H11Protocol, h11


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which by itself waits for a head as long as it takes."""

    header_seconds: float = 8.0

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; the time of a head runs from its first byte."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait_for_head()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request of HTTP, or has too long a head; called where h11 raised."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        message = "the head of the request is too long" if status == 431 else f"not a request of HTTP/1.1: {msg}"
        self._refuse(HttpRefusal(status, message, code="bad_request"))

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        seconds = f"{self.header_seconds:g} seconds"
        self._refuse(HttpRefusal(408, f"no request was there within {seconds}", code="timeout"))

    def _refuse(self, refusal: HttpRefusal) -> None:
        body = refusal.encoded()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=refusal.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        except h11.LocalProtocolError:
            pass  # an answer is under way, and this cannot be told within it
        self.transport.close()
