"""The ranks of a job say that they are there before jax connects them: who is missing, twice or of another job is
named.

jax ends the whole process, without an exception, when a port is taken or a rank does not come; this looks
first. One line of JSON each way over TCP, at the address where jax's coordinator will listen.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time

from polyreme.distributed.job.rendezvous import Address
from polyreme.errors import ConfigError

_LINE = 4096  # bytes; a longer greeting is not from one of ours
_RETRY = 0.1  # seconds between attempts to reach rank 0
_GREETING = 5.0  # seconds a connection may take to say who it is


def is_loopback(host: str) -> bool:
    """True for a host name or address that only this machine reaches."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def meet(address: str, rank: int, size: int, timeout: float) -> None:
    """Return once all ranks 0..size-1 are there.

    timeout: seconds. Raises ConfigError naming the address: the port is taken, nobody answers, a rank is missing, comes
    twice, or was told another number of ranks.
    """
    host, port = Address.parse(address, "PADDLE_MASTER")
    deadline = time.monotonic() + timeout
    if rank:
        _report(host, port, rank, size, deadline, address, timeout)
        return
    with contextlib.closing(_listen(host, port, address)) as listener:
        _gather(listener, size, deadline, address, timeout)


def _listen(host: str, port: int, address: str) -> socket.socket:
    where = host if is_loopback(host) else ""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((where, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        why = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"rank 0 cannot wait for the other ranks at {address}: port {port} {why}; set PADDLE_MASTER (launch: "
            "--master) to a free port on rank 0's machine"
        ) from None
    return listener


def _gather(listener: socket.socket, size: int, deadline: float, address: str, timeout: float) -> None:
    there: dict[int, socket.socket] = {}
    answer: dict = {}
    try:
        while len(there) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                raise _missing(there, size, address, timeout) from None
            _admit(peer, there, size, address)
    except ConfigError as error:
        answer = {"error": str(error)}
        raise
    finally:
        for peer in there.values():
            _say(peer, answer)
        for peer in there.values():
            # the side that closes first keeps the port busy for a minute: let it be the other one
            with contextlib.suppress(OSError):
                peer.settimeout(_GREETING)
                peer.recv(1)
            peer.close()


def _missing(there: dict[int, socket.socket], size: int, address: str, timeout: float) -> ConfigError:
    ranks = sorted(set(range(1, size)) - set(there))
    return ConfigError(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size} did not come to {address} within "
        f"{timeout:g} s; look at their logs, or set PADDLE_TRAINERS_NUM to the number of processes started "
        "(POLYREME_INIT_TIMEOUT sets the seconds)"
    )


def _admit(peer: socket.socket, there: dict[int, socket.socket], size: int, address: str) -> None:
    """Take a rank in; a connection that does not say it is one is dropped."""
    peer.settimeout(_GREETING)
    said = _hear(peer) or {}
    rank, theirs = said.get("rank"), said.get("size")
    if not isinstance(rank, int) or not isinstance(theirs, int):
        peer.close()
        return
    wrong = None
    if theirs != size:
        wrong = f"rank {rank} was told of {theirs} ranks, rank 0 of {size}; set PADDLE_TRAINERS_NUM alike everywhere"
    elif rank in there or not 0 < rank < size:
        wrong = f"two processes are rank {rank} of {size}; give each its own PADDLE_TRAINER_ID"
    if wrong is None:
        there[rank] = peer
        return
    error = ConfigError(f"the ranks cannot meet at {address}: {wrong}")
    _say(peer, {"error": str(error)})
    peer.close()
    raise error


def _report(host: str, port: int, rank: int, size: int, deadline: float, address: str, timeout: float) -> None:
    with contextlib.closing(_connect(host, port, rank, deadline, address, timeout)) as link:
        _say(link, {"rank": rank, "size": size})
        # rank 0 gives up at its own deadline and says why: wait a little longer for that
        link.settimeout(max(deadline - time.monotonic(), 0.001) + _GREETING)
        said = _hear(link)
    if said is None:
        raise ConfigError(
            f"rank {rank} reached {address}, but what listens there does not answer as rank 0 of a job; is "
            "PADDLE_MASTER the address of another service?"
        )
    if "error" in said:
        raise ConfigError(f"answer of rank 0: {str(said['error'])[:1000]}")


def _connect(host: str, port: int, rank: int, deadline: float, address: str, timeout: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(min(left, _GREETING), 0.001))
        except OSError as error:
            if deadline - time.monotonic() < _RETRY:
                raise ConfigError(
                    f"rank {rank} found no rank 0 at {address} within {timeout:g} s ({error.strerror or error}); start "
                    "it, or set PADDLE_MASTER (launch: --master) to its address (POLYREME_INIT_TIMEOUT sets the "
                    "seconds)"
                ) from None
            time.sleep(_RETRY)


def _say(link: socket.socket, what: dict) -> None:
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(what).encode() + b"\n")


def _hear(link: socket.socket) -> dict | None:
    """One line, or None if it does not come, is too long or is not an object."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < _LINE:
            part = link.recv(_LINE - len(text))
            if not part:
                break
            text += part
        said = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
