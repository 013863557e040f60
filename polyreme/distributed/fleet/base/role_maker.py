"""Roles: which worker this process is, out of how many, and where the others are.

A worker is a process. There are no servers: a role that asks for one is refused by fleet.init.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyreme import flags
from polyreme.distributed.communication.group import num_ranks, this_rank
from polyreme.errors import ConfigError, did_you_mean


class Role:
    """The role of a process in a job."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3
    ALL = 4
    COORDINATOR = 5


class RoleMakerBase:
    """Answers about this process. is_collective: workers talk to each other, not to servers."""

    is_collective: bool

    def __init__(self, is_collective: bool = False) -> None:
        self.is_collective = bool(is_collective)

    def role(self) -> int:
        """One of Role."""
        return Role.WORKER

    def worker_index(self) -> int:
        """This worker's number, from 0."""
        return this_rank()

    def worker_num(self) -> int:
        """Number of workers."""
        return num_ranks()

    def worker_endpoints(self) -> list[str]:
        """host:port of every worker; [] if nobody said."""
        return []

    def server_endpoints(self) -> list[str]:
        """host:port of every parameter server."""
        return []

    def is_worker(self) -> bool:
        """True if this process trains."""
        return self.role() == Role.WORKER

    def is_server(self) -> bool:
        """True if this process holds parameters for others."""
        return self.role() == Role.SERVER

    def is_first_worker(self) -> bool:
        """True for worker 0."""
        return self.is_worker() and self.worker_index() == 0

    def to_string(self) -> str:
        """The role, ranks and endpoints on one line."""
        return (
            f"role: {self.role()}, current_id: {self.worker_index()}, worker_endpoints: {self.worker_endpoints()}, "
            f"server_endpoints: {self.server_endpoints()}"
        )

    __repr__ = to_string


class PaddleCloudRoleMaker(RoleMakerBase):
    """The role that a launcher left in the environment: TRAINING_ROLE, PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM,
    PADDLE_TRAINER_ENDPOINTS and PADDLE_PSERVERS_IP_PORT_LIST.
    """

    _ROLES: ClassVar = {"TRAINER": Role.WORKER, "PSERVER": Role.SERVER, "HETER_TRAINER": Role.HETER_WORKER}

    def __init__(self, is_collective: bool = False, init_gloo: bool = False, *, path: Any = None) -> None:
        super().__init__(is_collective)
        _check_no_gloo("PaddleCloudRoleMaker", init_gloo, path)

    def role(self) -> int:
        name = flags.training_role()
        if name not in self._ROLES:
            raise ConfigError(f"TRAINING_ROLE={name!r} in the environment{did_you_mean(name, self._ROLES)}")
        return self._ROLES[name]

    def worker_endpoints(self) -> list[str]:
        return flags.trainer_endpoints()

    def server_endpoints(self) -> list[str]:
        return flags.server_endpoints()


class UserDefinedRoleMaker(RoleMakerBase):
    """The role that the script says.

    current_id: this worker's number. worker_num: how many there are, the number of worker_endpoints if left out.
    Raises ConfigError for a number out of range.

    >>> UserDefinedRoleMaker(is_collective=True, current_id=1, worker_num=2).is_first_worker()
    False
    """

    def __init__(
        self,
        is_collective: bool = False,
        init_gloo: bool = False,
        *,
        current_id: int = 0,
        role: int = Role.WORKER,
        worker_num: int | None = None,
        worker_endpoints: Sequence[str] = (),
        server_endpoints: Sequence[str] = (),
        path: Any = None,
    ) -> None:
        super().__init__(is_collective)
        _check_no_gloo("UserDefinedRoleMaker", init_gloo, path)
        number = len(worker_endpoints) or 1 if worker_num is None else worker_num
        if not 0 <= current_id < number:
            raise ConfigError(f"UserDefinedRoleMaker: current_id={current_id} is not one of {number} workers")
        self._role, self._current_id, self._worker_num = role, current_id, number
        self._worker_endpoints, self._server_endpoints = list(worker_endpoints), list(server_endpoints)

    def role(self) -> int:
        return self._role

    def worker_index(self) -> int:
        return self._current_id

    def worker_num(self) -> int:
        return self._worker_num

    def worker_endpoints(self) -> list[str]:
        return list(self._worker_endpoints)

    def server_endpoints(self) -> list[str]:
        return list(self._server_endpoints)


def _check_no_gloo(what: str, init_gloo: bool, path: Any) -> None:
    if path is not None or init_gloo:
        raise ConfigError(
            f"{what}: init_gloo and path start a rendezvous of their own; call distributed.init_parallel_env, or start "
            "the script with the launcher"
        )
