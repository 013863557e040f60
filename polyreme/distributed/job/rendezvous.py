"""The meeting point of a job's processes: lines of JSON over TCP, one server, many clients.

The launcher of node 0 (or rank 0, without a launcher) serves; launchers and watchdogs connect. A client shows the token
of the job in its greeting (POLYREME_JOB_TOKEN, which a launcher makes up for the processes that it starts); nothing is
encrypted, so keep the port inside the cluster. Nothing but JSON is ever decoded.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from polyreme import flags
from polyreme.errors import ConfigError

_log = logging.getLogger("polyreme.launch")
Message = dict[str, Any]
PROTOCOL = "polyreme-store-1"
_MAX_LINE = 1 << 20  # bytes; a traceback and the last lines of a log fit many times
_RETRY_SECONDS = 0.2


class Address(NamedTuple):
    """host:port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, what: str) -> "Address":
        """From "host:port"; what is the setting's name, for the ConfigError of anything else.

        >>> Address.parse("10.0.0.1:6070", "--master")
        Address(host='10.0.0.1', port=6070)
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{what} {text!r}: needs host:port with a port of 1 to 65535, such as 10.0.0.1:6070")
        return cls(host.strip("[]"), int(port))


def free_port(host: str, start: int | None = None) -> int:
    """A TCP port nobody listens on: any one, or the first from start on."""
    for port in [0] if start is None else range(start, min(start + 1000, 65536)):
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return probe.getsockname()[1]
    raise ConfigError(f"no free port on {host}" + (f" from {start} on; choose another --start_port" if start else ""))


def own_host(reaching: str) -> str:
    """The address by which this machine is seen from the host reaching."""
    try:
        with socket.socket(_family(reaching), socket.SOCK_DGRAM) as probe:
            probe.connect((reaching, 9))  # sends nothing: asks the kernel for the route
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Connection:
    """The server's end of one client; who is what the client said of itself in its first message."""

    def __init__(self, writer: asyncio.StreamWriter, who: Message) -> None:
        self._writer = writer
        self.who = who

    def send(self, message: Message) -> None:
        """Queue a message; nothing happens if the client is gone, as its end is told apart."""
        if not self._writer.is_closing():
            self._writer.write(_encode(message))

    def close(self) -> None:
        """End the connection after what is queued."""
        self._writer.close()


class Handler(Protocol):
    """The server's reactions to its clients; all run in the server's event loop, one call at a time."""

    def token(self, who: Message) -> str:
        """The token that a client of this kind must show; empty if anybody may connect."""
        ...

    def refusal(self, who: Message) -> str | None:
        """Why a client that says this of itself cannot come in; None if it can. What it says is of the right kinds."""
        ...

    def opened(self, connection: Connection) -> None:
        """A client came in."""
        ...

    def received(self, connection: Connection, message: Message) -> None:
        """A message of a client."""
        ...

    def closed(self, connection: Connection) -> None:
        """A client is gone."""
        ...


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listen; raises OSError if the address cannot be had. Port 0 takes any."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await _welcome(handler, reader, writer)
        if connection is None:
            return
        try:
            while line := await _next_line(reader):
                message = _decode(line)
                if message is not None:
                    _hand_over(handler, connection, message)
        except asyncio.CancelledError:  # the loop ends, and nobody asks about this task
            return
        handler.closed(connection)
        writer.close()

    return await asyncio.start_server(talk, host, port, limit=_MAX_LINE)


def _hand_over(handler: Handler, connection: Connection, message: Message) -> None:
    try:
        handler.received(connection, message)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        kind, sender = message.get("t"), connection.who.get("host")
        _log.warning("a message %r of %s cannot be read and is ignored: %r", kind, sender, error)


_GREETINGS: dict[str, dict[str, type]] = {
    "rank": {"rank": int, "world": int, "attempt": int, "host": str},
    "node": {"node": int, "nodes": list, "job": str, "host": str, "ports": list},
}
"""What each kind of client says of itself; lists are of whole numbers."""


def _malformed(who: Message) -> str | None:
    """The fault of a greeting; None if each field is present and of the right type."""
    kind = who.get("kind")
    fields = _GREETINGS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"it calls itself {repr(kind)[:80]}; launchers and ranks of a polyreme job come here"
    for name, wanted in fields.items():
        value = who.get(name)
        # type() and not isinstance: True is no rank
        is_other = type(value) is not wanted
        if is_other or (isinstance(value, list) and not all(type(item) is int for item in value)):
            return f"its greeting has {name}={repr(value)[:80]}, which is no {wanted.__name__}; is it of this version?"
    return None


def _answer(handler: Handler, who: Message) -> str | None:
    """Why a client is refused, None if it may come in."""
    problem = _malformed(who)
    if problem is not None:
        return problem
    token = handler.token(who)
    if token and not hmac.compare_digest(str(who.pop("token", "")).encode(), token.encode()):
        return "it does not show this job's token; give every launcher the same POLYREME_JOB_TOKEN"
    return handler.refusal(who)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Empty at the end: closed or reset by the peer, or a line beyond the limit."""
    with contextlib.suppress(OSError, ValueError):
        return await reader.readline()
    return b""


async def _welcome(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection | None:
    """The connection of a client that speaks our protocol and is not refused."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        _notice_cut_networks(writer.get_extra_info("socket"))
        who = _decode(await asyncio.wait_for(reader.readline(), 10))
        if who is not None and who.get("protocol") == PROTOCOL:
            refusal = _answer(handler, who)
            writer.write(_encode({"t": "welcome", "protocol": PROTOCOL, "refusal": refusal}))
            if refusal is None:
                connection = Connection(writer, who)
                handler.opened(connection)
                return connection
    writer.close()
    return None


class Client:
    """A connection to a server, with a thread that hands over what comes in.

    on_message and on_end run in that thread. Raises ConfigError if nobody answers at the address within timeout
    seconds, or something that is no polyreme store, or if it refuses this process.
    """

    def __init__(
        self,
        address: Address,
        who: Message,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
        timeout: float,
    ) -> None:
        self.address = address
        self._on_message, self._on_end = on_message, on_end
        self._lock = threading.Lock()
        self._socket = _connect(address, timeout)
        self._lines = self._socket.makefile("rb")
        self.send({**who, "protocol": PROTOCOL, "token": flags.job_token()})
        self._expect_welcome(timeout)
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._read, name="polyreme-store", daemon=True).start()

    def send(self, message: Message) -> bool:
        """Send at once; False if the server is gone."""
        try:
            with self._lock:
                self._socket.sendall(_encode(message))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the connection; on_end is called."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _expect_welcome(self, timeout: float) -> None:
        self._socket.settimeout(min(timeout, 10.0))
        try:
            first = _decode(self._lines.readline(_MAX_LINE))
        except OSError:
            first = None
        if first is None or first.get("protocol") != PROTOCOL:
            self._lines.close()
            self._socket.close()
            raise ConfigError(
                f"{self.address} is not a polyreme store: the port is taken by another program; choose another --master"
            )
        if first.get("refusal"):
            self._lines.close()
            self._socket.close()
            raise ConfigError(f"the job's store at {self.address} refuses this process: {first['refusal']}")
        self._socket.settimeout(None)

    def _let_go(self) -> None:
        """In a forked child: a copy of the connection would hide the end of the parent from the server."""
        number = self._socket.fileno()
        if number >= 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.close(null)

    def _read(self) -> None:
        try:
            while line := self._lines.readline(_MAX_LINE):
                message = _decode(line)
                if message is not None:
                    self._on_message(message)
        except OSError:  # reset by the server
            pass
        self._lines.close()
        self._socket.close()
        self._on_end()


def _connect(address: Address, timeout: float) -> socket.socket:
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.1, min(5.0, end - time.monotonic())))
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > end:
                raise ConfigError(
                    f"nobody answers at {address} within {timeout:g} s ({error}): is the process of rank 0 running, is "
                    "the address right, and does the firewall let the port through? POLYREME_INIT_TIMEOUT sets the wait"
                ) from error
            time.sleep(_RETRY_SECONDS)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_cut_networks(connection)
        return connection


def _notice_cut_networks(connection: socket.socket) -> None:
    """End a connection whose other side has been out of reach for half a minute; by itself TCP waits for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # Linux has all of them; the last is in milliseconds
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Message | None:
    """The message of a line; None for anything but an object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
