"""`polyreme launch` and `python -m polyreme.distributed.launch`: from the words of a command line to an exit code."""

import asyncio
import errno
import logging
import sys
from collections.abc import Sequence

from polyreme import flags
from polyreme.distributed.job.rendezvous import Address, serve
from polyreme.distributed.launch.coordinator import Coordinator
from polyreme.distributed.launch.node import LaunchNode
from polyreme.distributed.launch.options import Options, help_text, parse
from polyreme.distributed.launch.schedulers import SCHEDULERS
from polyreme.distributed.launch.schedulers.base import EXIT_CODE_FILE
from polyreme.errors import ConfigError

_log = logging.getLogger("polyreme.launch")


def main(words: Sequence[str] | None = None) -> int:
    """Launch what a command line says; returns the exit code: the job's, or 2 for what cannot be launched."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] in (["--help"], ["-h"]):
        sys.stdout.write(help_text() + "\n")
        return 0
    try:
        return launch(parse(words))
    except ConfigError as error:
        if flags.debug():
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:  # before there were processes to pass it on to
        return 130


def launch(options: Options) -> int:
    """Start the job's processes on this node and see them to their end, or hand the job to a scheduler.

    Returns the exit code. Raises ConfigError.
    """
    if options.submission is not None:
        return SCHEDULERS[options.scheduler].submit(options.submission)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("polyreme launch: %(message)s"))
    _log.handlers, _log.propagate = [handler], False
    _log.setLevel(options.log_level)
    return asyncio.run(_launch(options))


async def _launch(options: Options) -> int:
    coordinator = Coordinator(options)
    server = None if options.node > 0 else await _serve(coordinator, options)
    if server is None:
        if options.master is None:
            raise ConfigError(f"launch: --rank {options.node} without --master: give node 0's host:port")
        return await LaunchNode(options, options.master, is_first=False).run()
    name, port = server.sockets[0].getsockname()[:2]
    address = Address(options.master.host if options.master else name, port)
    try:
        code = await _run_both(coordinator, LaunchNode(options, address, is_first=True), address)
        if options.scheduler != "local":
            (options.log_dir / EXIT_CODE_FILE).write_text(f"{code}\n")
        return code
    finally:
        server.close()


async def _run_both(coordinator: Coordinator, node: LaunchNode, address: Address) -> int:
    """This node's part, and the whole."""
    whole = asyncio.create_task(coordinator.run(address))
    part = asyncio.create_task(node.run())
    done, _ = await asyncio.wait([whole, part], return_when=asyncio.FIRST_COMPLETED)
    if part in done and part.exception() is not None:
        whole.cancel()
        await asyncio.wait([whole])
        part.result()
    code = await whole
    await part
    return code


async def _serve(coordinator: Coordinator, options: Options) -> asyncio.Server | None:
    """Listen as node 0; None if --rank is not given and another launcher does so already."""
    wanted = options.master or Address(options.host or "127.0.0.1", 0)
    try:
        return await serve(coordinator, wanted.host, wanted.port)
    except OSError as error:
        if options.node < 0 and not options.is_single_node:
            return None
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"launch: {wanted} is taken by another program; choose another port in --master"
            ) from None
        raise ConfigError(
            f"launch: node 0 cannot listen on {wanted} ({error.strerror or error}); --master must be its own address"
        ) from None
