"""The process that serves: it listens first, loads the model beside that, and drains when it is asked to end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from polyreme.errors import ConfigError
from polyreme.serving.app import Endpoints
from polyreme.serving.connection import BoundedConnection
from polyreme.serving.guard import Access, Guard
from polyreme.serving.service import AnyModel, ServiceLimits, TextService
from polyreme.serving.web import uvicorn

_MOST_CONNECTIONS = 1000
"""Beside the files of a process, of which many systems allow 1024."""
_log = logging.getLogger("polyreme.serving")


@dataclass(frozen=True)
class ServerOptions:
    """names: of the model. host, port: where to listen, port 0 for a free one. drain_seconds: that requests under way
    have to end after SIGTERM. adapters: names of those beside the model."""

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: float = 30.0
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    access: Access = field(default_factory=lambda: Access.of("127.0.0.1"))
    adapters: tuple[str, ...] = ()


def serve(options: ServerOptions, load: Callable[[], AnyModel], say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, in the main thread; what is under way is finished first.

    load: makes the model, while /health says 503. Raises ConfigError for an address that cannot be had, and whatever
    load raises.
    """
    service = TextService(options.names, options.limits, options.adapters)
    listener = listen(options.host, options.port)
    server = Server(service, options)
    failures: list[BaseException] = []

    async def run() -> None:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening on {url}, loading the model")
        loading = asyncio.ensure_future(_load(service, load))

        def ended(task: asyncio.Future[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failures.append(error)
                server.should_exit = True
            elif not task.cancelled():
                beside = f" and adapters {', '.join(options.adapters)}" if options.adapters else ""
                say(f"serving {options.names[0]}{beside} on {url}")

        loading.add_done_callback(ended)
        await server.serve(sockets=[listener])
        service.close()
        if not loading.done():
            # a thread cannot be stopped; what it makes is thrown away
            loading.cancel()

    asyncio.run(run())
    if failures:
        raise failures[0]
    say("stopped")


def leave() -> NoReturn:
    """End the process with 0, at once: what it has to do at its end is done, and what it wrote is out.

    Python's own end looks through all that jax made, which takes seconds, and tears what a thread uses that still loads
    or compiles: the process aborts.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises ConfigError where the address cannot be had."""
    try:
        # with its protocol, as asyncio sends small writes at once on sockets alone that say they are TCP
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; give another --host or --port") from None
    listener.setblocking(False)
    return listener


async def _load(service: TextService, load: Callable[[], AnyModel]) -> None:
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[AnyModel] = loop.create_future()

    def tell(name: str, value: Any) -> None:
        if not loaded.done():
            getattr(loaded, name)(value)

    def work() -> None:
        try:
            model = load()
        except BaseException as error:  # noqa: BLE001  (raised again by who called serve)
            name, value = "set_exception", error
        else:
            name, value = "set_result", model
        with contextlib.suppress(RuntimeError):  # the loop is closed when the server ended meanwhile
            loop.call_soon_threadsafe(tell, name, value)

    threading.Thread(target=work, name="polyreme-loading", daemon=True).start()
    service.start(await loaded)


class GuardedServer(uvicorn.Server):
    """A uvicorn server of an ASGI application, behind a Guard. After SIGTERM it finishes what is under way and returns;
    a second one ends it."""

    def __init__(self, app: Any, access: Access, limits: ServiceLimits, drain_seconds: float) -> None:
        connection = type("Connection", (BoundedConnection,), {"header_seconds": limits.header_seconds})
        config = uvicorn.Config(
            Guard(app, access, limits),
            http=connection,
            h11_max_incomplete_event_size=limits.header_bytes,
            limit_concurrency=_MOST_CONNECTIONS,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(max(1, limits.header_seconds)),
            timeout_graceful_shutdown=int(max(1, drain_seconds)),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while serving; uvicorn raises them again when it has drained, which is no success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain; the second time leave at once."""
        if self.should_exit:
            self.force_exit = True
            # answers that are cut off are no faults to tell of
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = True
        self.drain()

    def drain(self) -> None:
        """Called when the server begins to end."""


class Server(GuardedServer):
    """The server of a service."""

    endpoints: Endpoints

    def __init__(self, service: TextService, options: ServerOptions) -> None:
        self.endpoints = Endpoints(service)
        super().__init__(self.endpoints.app(), options.access, options.limits, options.drain_seconds)
        self._service = service

    def drain(self) -> None:
        """The service takes no further request."""
        self._service.drain()


def names_of(path: Any, served: Sequence[str]) -> tuple[str, ...]:
    """The names that answers and requests use: those that were asked for, or the last part of the path. Raises
    ConfigError for one that is empty."""
    if not all(name.strip() for name in served):
        raise ConfigError("--served-model-name is empty; give a name, or leave it out for the path's last part")
    return tuple(served) or (str(path).rstrip("/").rsplit("/", 1)[-1],)
