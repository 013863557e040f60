"""Offsets between the clocks of a job's processes: rank 0 asks each for its time several times, as NTP does, and takes
the best answer.

The clock is time.monotonic_ns, which no adjustment moves. Source: Mills, RFC 5905, section 8.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from polyreme import flags
from polyreme.distributed.job.rendezvous import Address
from polyreme.errors import ConfigError

_ROUNDS = 32
_TIME = struct.Struct("!q")


class ClockOffset(NamedTuple):
    """ahead: of rank 0's clock; error: at most so much more or less. Nanoseconds."""

    ahead: int
    error: int


def measure(rank: int, world_size: int, host: str, share: Callable[[str | None], str]) -> ClockOffset:
    """This rank's offset. Every rank calls it; share(address on rank 0, else None) gives that address to every rank.

    host: this machine's address for the others. Raises ConfigError if another rank does not come.
    """
    if rank == 0:
        with socket.create_server((host, 0)) as server:
            server.settimeout(flags.init_timeout())
            share(str(Address(host, server.getsockname()[1])))
            for _ in range(world_size - 1):
                _ask(server)
        return ClockOffset(0, 0)
    address = Address.parse(share(None), "the address of rank 0's clock")
    try:
        with socket.create_connection(address, timeout=flags.init_timeout()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUNDS):
                _receive_time(connection)
                connection.sendall(_TIME.pack(time.monotonic_ns()))
            return ClockOffset(_receive_time(connection), _receive_time(connection))
    except OSError as error:
        raise ConfigError(f"rank 0's clock at {address} does not answer rank {rank} ({error})") from None


def _ask(server: socket.socket) -> None:
    """Compare clocks with the next rank that comes, and tell it."""
    try:
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(flags.init_timeout())
            best = ClockOffset(0, 1 << 62)
            for _ in range(_ROUNDS):
                begin = time.monotonic_ns()
                connection.sendall(_TIME.pack(begin))
                theirs = _receive_time(connection)
                end = time.monotonic_ns()
                best = min(
                    best, ClockOffset(theirs - (begin + end) // 2, (end - begin) // 2), key=lambda each: each.error
                )
            connection.sendall(_TIME.pack(best.ahead) + _TIME.pack(best.error))
    except OSError as error:
        raise ConfigError(f"a rank did not come to compare its clock with rank 0's ({error})") from None


def _receive_time(connection: socket.socket) -> int:
    data = b""
    while len(data) < _TIME.size:
        part = connection.recv(_TIME.size - len(data))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return _TIME.unpack(data)[0]
