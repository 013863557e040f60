"""Send and receive between two processes, through jax's transfer servers.

A sender lays an array out for its peer and goes on; the receiver pulls it. So any order of sends and
receives on the two sides works, and messages between two ranks of a group arrive in the order they were sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from polyreme import flags
from polyreme.core import state
from polyreme.distributed.communication import process_run
from polyreme.distributed.communication.group import Group, default_group, position, resolve
from polyreme.distributed.communication.task import CollectiveTask
from polyreme.distributed.job import watchdog
from polyreme.distributed.job.rendezvous import Address, own_host
from polyreme.eager.host import put
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, DeviceError, DTypeError, PlacementError, RankError, ShapeError

_CARD = 128  # bytes in which a sender says what it sends


def send(tensor: Tensor, dst: int = 0, group: Group | None = None, sync_op: bool = True) -> CollectiveTask | None:
    """Send a Tensor's value to rank dst. Returns once the value is laid out; dst takes it when it receives.

    Raises ConfigError for dst outside the group or this rank itself, PlacementError on a group of mesh axes.
    """
    found = _check("send", tensor, group)
    if found is None:
        return None
    array = state.read(tensor)
    send_array(array, _other("send", "dst", dst, found), found, "send")
    return CollectiveTask([array])


def recv(tensor: Tensor, src: int = 0, group: Group | None = None, sync_op: bool = True) -> CollectiveTask | None:
    """Receive into a Tensor, in place, what rank src sends: a value of its shape and dtype.

    sync_op=False: the Tensor has the value after wait() on the task. Raises ShapeError or DTypeError, at the wait, if
    the sender sent something else, RankError if it is gone.
    """
    found = _check("recv", tensor, group)
    if found is None:
        return None
    peer = _other("recv", "src", src, found)
    arrive = recv_array(tuple(tensor.shape), tensor.dtype, peer, found, "recv")

    def finish() -> None:
        state.write(tensor, put(arrive(), state.read(tensor).sharding))

    task = CollectiveTask([], finish)
    if sync_op:
        task.wait()
    return task


def isend(tensor: Tensor, dst: int, group: Group | None = None) -> CollectiveTask | None:
    """send with sync_op=False."""
    return send(tensor, dst, group, sync_op=False)


def irecv(tensor: Tensor, src: int | None = None, group: Group | None = None) -> CollectiveTask | None:
    """recv with sync_op=False. src must be given: a rank does not receive from any."""
    if src is None:
        raise ConfigError("irecv: src=None; name the rank that sends")
    return recv(tensor, src, group, sync_op=False)


class P2POp:
    """One of the calls that batch_isend_irecv makes: isend or irecv, the Tensor, the peer's rank."""

    def __init__(self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Group | None = None) -> None:
        if op not in (isend, irecv):
            raise ConfigError(f"P2POp: op must be distributed.isend or distributed.irecv, got {op!r}")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[CollectiveTask]:
    """Make these calls; returns their tasks. Any order on the two sides works."""
    if not p2p_op_list or not all(isinstance(p, P2POp) for p in p2p_op_list):
        raise ConfigError("batch_isend_irecv: needs a list of at least one P2POp")
    tasks = [p.op(p.tensor, p.peer, p.group) for p in p2p_op_list]
    return [t for t in tasks if t is not None]


class _Wires:
    """This process's transfer server, its connections, and how many messages went each way.

    Values go through host memory: the servers run on the processor's client, which every platform has.
    """

    def __init__(self) -> None:
        self.server: Any = None
        self.addresses: list[str] = []
        self.connections: dict[int, Any] = {}
        self.counts: dict[tuple[int, int, int], Iterator[int]] = {}

    def open(self) -> None:
        """Start the server and tell every process its address; a collective of all processes."""
        try:
            self.device = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            return  # JAX_PLATFORMS leaves the processor out: only messages need it
        where = f"{own_address()}:0"
        self.server = transfer.start_transfer_server(self.device.client, where, [where])
        text = np.zeros(_CARD, np.uint8)
        address = self.server.address().encode()
        text[: len(address)] = np.frombuffer(address, np.uint8)
        rows = process_run.run("all_gather", [jnp.asarray(text)], default_group(), join=True)[0]
        self.addresses = [bytes(row).rstrip(b"\0").decode() for row in np.asarray(rows).reshape(-1, _CARD)]

    def check(self, what: str) -> None:
        if self.server is None:
            raise DeviceError(
                f"{what}: messages between ranks go through the processor's memory; set JAX_PLATFORMS=cuda,cpu"
            )

    def to(self, rank: int) -> Any:
        if rank not in self.connections:
            self.connections[rank] = self.server.connect(self.addresses[rank])
        return self.connections[rank]

    def number(self, group: Group, sender: int, receiver: int) -> int:
        """The next message's number; both sides count alike, so it names the message."""
        key = (group.id, sender, receiver)
        count = next(self.counts.setdefault(key, itertools.count()))
        return group.id << 48 | receiver << 32 | count


wires: _Wires = _Wires()


def own_address() -> str:
    """The address of this machine at which the other ranks reach it: the one it reaches rank 0's machine from."""
    address = flags.master()
    # without a launcher's word, the address that packets leave from: 192.0.2.1 is nobody (RFC 5737)
    return own_host(Address.parse(address, "PADDLE_MASTER").host if address else "192.0.2.1")


def send_array(array: Any, peer: int, group: Group, what: str) -> None:
    """Lay an array out for the member at position peer."""
    wires.check(what)
    receiver = group.ranks[peer]
    number = wires.number(group, group.ranks[group.rank], receiver)
    card = np.zeros(_CARD, np.uint8)
    text = f"{array.dtype.name}{list(array.shape)}".encode()[:_CARD]
    card[: len(text)] = np.frombuffer(text, np.uint8)
    parts = [jax.device_put(card, wires.device)]
    # the servers do not move arrays without elements
    if array.size:
        parts.append(jax.device_put(array, wires.device))
    wires.server.await_pull(number, parts)


def recv_array(shape: tuple[int, ...], dtype: np.dtype, peer: int, group: Group, what: str) -> Callable[[], Any]:
    """Ask the member at position peer for an array; calling the result waits for it."""
    wires.check(what)
    sender = group.ranks[peer]
    number = wires.number(group, sender, group.ranks[group.rank])
    place = SingleDeviceSharding(wires.device)
    wanted = [jax.ShapeDtypeStruct((_CARD,), np.uint8, sharding=place)]
    if np.prod(shape):
        wanted.append(jax.ShapeDtypeStruct(shape, dtype, sharding=place))
    coming = wires.to(sender).pull(number, wanted)

    def arrive() -> Any:
        with watchdog.phase(what, detail=f"{dtype.name}{list(shape)} from rank {sender}"):
            _check_card(what, coming[0], f"{dtype.name}{list(shape)}", sender)
            return jax.block_until_ready(coming[1]) if len(coming) > 1 else jnp.zeros(shape, dtype)

    return arrive


def _check_card(what: str, card: Any, wanted: str, sender: int) -> None:
    try:
        sent = bytes(np.asarray(card)).rstrip(b"\0").decode()
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise RankError(f"{what} from rank {sender} failed, most likely because it is gone: {text}") from error
    if sent == wanted:
        return
    kind = ShapeError if sent.split("[")[0] == wanted.split("[")[0] else DTypeError
    raise kind(f"{what}: rank {sender} sent {sent}, the Tensor to receive into is {wanted}")


def _check(what: str, tensor: Any, group: Group | None) -> Group | None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: needs a Tensor, got {type(tensor).__name__}")
    members = resolve(group, what)
    if members is not None and members.axes:
        raise PlacementError(
            f"{what} on mesh axes {members.axes}: one process drives all their devices, so there is no other side; "
            "give a group of processes, or move pieces with alltoall"
        )
    if isinstance(tensor._array, state.Tracer):
        raise CaptureError(f"{what} inside a captured function: a program reaches no other process; call it outside")
    return members


def _other(what: str, role: str, rank: int, group: Group) -> int:
    at = position(group, rank, what, role)
    if at == group.rank:
        raise ConfigError(f"{what}: {role}={rank} is this rank itself; assign the Tensor instead")
    return at
