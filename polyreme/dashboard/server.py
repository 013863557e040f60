"""The process that serves the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from polyreme.dashboard.app import Dashboard
from polyreme.dashboard.run import RunList
from polyreme.errors import ConfigError
from polyreme.serving.guard import Access
from polyreme.serving.server import GuardedServer, listen
from polyreme.serving.service import ServiceLimits


def serve(
    folders: Sequence[Path], say: Callable[[str], None], *, host: str = "127.0.0.1", port: int = 0, access: Access
) -> None:
    """Serve the runs in some folders until SIGTERM or Ctrl-C, in the main thread. port: 0 for a free one.

    Raises ConfigError for a folder that is not there and an address that cannot be had. A folder without runs is
    watched: its first one appears.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give the output folder of a run, or one that holds runs")
    runs = RunList(folders)
    listener = listen(host, port)
    name, number = listener.getsockname()[:2]
    count = len(runs.runs())
    address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
    say(f"{count} run{'' if count == 1 else 's'} on {address}; Ctrl-C ends it")
    limits = ServiceLimits(body_bytes=1 << 10)
    server = GuardedServer(Dashboard(runs).app(), access, limits, drain_seconds=1.0)
    asyncio.run(server.serve(sockets=[listener]))
    say("stopped")
