"""Joining the processes of a job, and what each knows of its place.

A rank is a process; it may drive many devices.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

import jax

from polyreme import flags
from polyreme.core.devices import place
from polyreme.core.engine import backend
from polyreme.distributed.communication.collectives import barrier
from polyreme.distributed.communication.group import (
    Group,
    destroy_process_group,
    groups,
    is_initialized,
    join_world,
    num_ranks,
    this_rank,
)
from polyreme.distributed.communication.objects import broadcast_object_list
from polyreme.distributed.communication.point_to_point import own_address, wires
from polyreme.distributed.job import roll_call, watchdog
from polyreme.distributed.job.last_words import exit_code, leave_now
from polyreme.distributed.job.rendezvous import Address
from polyreme.errors import ConfigError
from polyreme.io.worker_info import is_worker


def init_parallel_env(nccl_config: Any = None) -> Group:
    """Join the other processes of the job; returns the group of all of them. Call it before anything uses a device.

    The first ProcessMesh, new_group, DataParallel or collective of a launched rank calls it, if no device was used by
    then. Who they are is read from a launcher's variables (PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ID, PADDLE_MASTER), else
    found by jax from SLURM, Open MPI or Kubernetes; without any of them there is one process. A second call returns
    the group. From then on the watchdog watches this rank, and an uncaught exception ends it at once: at exit it would
    wait for the others. Raises ConfigError, within POLYREME_INIT_TIMEOUT seconds, if the ranks do not find each other.
    """
    if nccl_config is not None:
        raise ConfigError("init_parallel_env: XLA sets NCCL up by itself; leave nccl_config out")
    return groups.by_id[0] if is_initialized() else _join("init_parallel_env()")


def join_early(what: str) -> None:
    """Join the other processes if a launcher started this one, it has not joined, and it still can."""
    if is_waited_for() and not backend.is_started():
        _join(what)


def is_waited_for() -> bool:
    """Whether a launcher counts this process as one of several ranks that has not joined the others."""
    return flags.trainers_num() > 1 and not jax.distributed.is_initialized() and not is_worker()


def _join(what: str) -> Group:
    """Join, and make the group of all processes; what needs them, for the message where it is too late."""
    if not jax.distributed.is_initialized():
        _meet(what)
    group = join_world()
    if group.nranks > 1:
        wires.open()
        watchdog.start(group.rank, group.nranks, share=_share, host=own_address())
    return group


groups.join = _join


def gloo_init_parallel_env(rank_id: int, rank_num: int, server_endpoint: str) -> None:
    """init_parallel_env for rank_id of rank_num processes that meet at server_endpoint, host:port of rank 0."""
    os.environ["PADDLE_TRAINER_ID"] = str(rank_id)
    os.environ["PADDLE_TRAINERS_NUM"] = str(rank_num)
    os.environ["PADDLE_MASTER"] = server_endpoint
    init_parallel_env()


def gloo_barrier() -> None:
    """barrier() of all processes."""
    barrier()


def gloo_release() -> None:
    """destroy_process_group() of all groups."""
    destroy_process_group()


def _meet(what: str) -> None:
    shown = sys.excepthook
    _end_at_once_on_errors()
    size, rank = flags.trainers_num(), flags.trainer_id()
    cluster = None if flags.trainers_given() else flags.cluster()
    if rank >= size and cluster is None:
        raise ConfigError(f"PADDLE_TRAINER_ID={rank}, but PADDLE_TRAINERS_NUM={size}: ranks are 0..{size - 1}")
    if size == 1 and cluster is None:
        sys.excepthook = shown
        return
    address = flags.master()
    if address is None and cluster is None:
        raise ConfigError(
            f"PADDLE_TRAINERS_NUM={size}, but neither PADDLE_MASTER nor PADDLE_TRAINER_ENDPOINTS says where they meet; "
            "start the script with `polyreme launch`, or set PADDLE_MASTER=host:port of rank 0"
        )
    if backend.is_started():
        raise ConfigError(
            f"{what}: rank {rank} has to join the others first, and a device is in use already, before which alone jax "
            "can; call polyreme.distributed.init_parallel_env() at the top of the script, before set_device, to_tensor "
            "and layers"
        )
    backend.prepare_for_processes()
    options = {
        "initialization_timeout": flags.init_timeout(),
        "heartbeat_timeout_seconds": flags.heartbeat_timeout(),
        "local_device_ids": flags.selected_devices(),
    }
    if cluster is not None or address is None:
        jax.distributed.initialize(**options)
        # for what reads a launcher's variables: samplers, and processes started from here
        os.environ["PADDLE_TRAINER_ID"] = str(jax.process_index())
        os.environ["PADDLE_TRAINERS_NUM"] = str(jax.process_count())
        return
    if flags.store() is not None:
        # first, so that a rank lost from here on is noticed
        watchdog.start(rank, size)
    roll_call.meet(address, rank, size, flags.init_timeout())
    if roll_call.is_loopback(Address.parse(address, "PADDLE_MASTER").host):
        # by default jax would listen on all of the machine's addresses
        options["coordinator_bind_address"] = address
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate", **options)


def _end_at_once_on_errors() -> None:
    """At exit jax waits minutes for ranks that wait for this one: an uncaught exception skips that.

    The others then see closed connections, and the watchdog's store who it was. The exit code is the exception's.
    """
    shown = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        leave_now(exit_code(error))

    sys.excepthook = end


def _share(address: str | None) -> str:
    """The store's address, as rank 0 has it, on every rank."""
    found = [address or ""]
    broadcast_object_list(found, 0)
    return found[0]


class ParallelEnv:
    """The environment of a process in a job: its rank, the number of ranks, their addresses.

    >>> env = ParallelEnv()
    >>> env.rank, env.world_size
    (0, 1)
    """

    @property
    def rank(self) -> int:
        """Rank of this process among all."""
        return this_rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return num_ranks()

    @property
    def local_rank(self) -> int:
        """rank, by the name Paddle keeps for it."""
        return self.rank

    @property
    def nranks(self) -> int:
        """world_size."""
        return self.world_size

    @property
    def device_id(self) -> int:
        """Index of the device that new Tensors go to."""
        return place.default_place().index

    dev_id = device_id

    @property
    def device_type(self) -> str:
        """Platform of that device: "cpu", "gpu", ..."""
        return place.default_place().platform

    @property
    def current_endpoint(self) -> str:
        """host:port of this rank, from the launcher."""
        return flags.current_endpoint()

    @property
    def trainer_endpoints(self) -> list[str]:
        """host:port of every rank, from the launcher."""
        return flags.trainer_endpoints()

    @property
    def nrings(self) -> int:
        """Number of communication rings: one, XLA makes what it needs."""
        return 1
