"""Roles of 1.7 over those of polyreme.distributed.fleet: every process is a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.distributed.communication.collectives import barrier
from polyreme.distributed.communication.objects import all_gather_object
from polyreme.distributed.fleet.base import role_maker as ours
from polyreme.distributed.fleet.base.role_maker import Role
from polyreme.errors import ConfigError

_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}


class RoleMakerBase(ours.RoleMakerBase):
    """A process's place in a job, and what workers do together."""

    def generate_role(self) -> None:
        """Nothing is left to do: the role is known when it is made."""

    def get_trainer_endpoints(self) -> list[str]:
        """host:port of every worker."""
        return self.worker_endpoints()

    def get_pserver_endpoints(self) -> list[str]:
        """host:port of every parameter server."""
        return self.server_endpoints()

    def get_local_endpoint(self) -> str:
        """host:port of this worker."""
        return self.worker_endpoints()[self.worker_index()]

    def server_index(self) -> int:
        """Raises ConfigError: no process is a parameter server."""
        raise ConfigError("server_index: there are no parameter servers here; every process is a worker")

    def server_num(self) -> int:
        """How many parameter servers there are."""
        return len(self.server_endpoints())

    def all_gather(self, input: Any) -> list[Any]:
        """input of every worker, in the order of their indices."""
        gathered: list[Any] = [input]
        if self.worker_num() > 1:
            gathered = []
            all_gather_object(gathered, input)
        return gathered

    def all_reduce_worker(self, input: Any, output: Any, mode: str = "sum") -> None:
        """Write into output, an ndarray, the "sum", "max" or "min" of every worker's input. ConfigError for another."""
        if mode not in _REDUCTIONS:
            raise ConfigError(f"all_reduce_worker: mode={mode!r}; it is {', '.join(_REDUCTIONS)}")
        output[...] = _REDUCTIONS[mode](np.stack(self.all_gather(np.asarray(input))), axis=0)

    def barrier_worker(self) -> None:
        """Wait until every worker is here."""
        if self.worker_num() > 1:
            barrier()

    def barrier_all(self) -> None:
        """barrier_worker: every process is a worker."""
        self.barrier_worker()


class PaddleCloudRoleMaker(ours.PaddleCloudRoleMaker, RoleMakerBase):
    """The role that a launcher left in the environment."""

    def __init__(self, is_collective: bool = False) -> None:
        super().__init__(is_collective)


class UserDefinedRoleMaker(ours.UserDefinedRoleMaker, RoleMakerBase):
    """The role that the script says: one of worker_num workers, or a parameter server, which fleet refuses."""

    def __init__(
        self, current_id: int = 0, role: int = Role.WORKER, worker_num: int = 0,
        server_endpoints: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            current_id=current_id, role=role, worker_num=worker_num or 1, server_endpoints=server_endpoints or ()
        )


class UserDefinedCollectiveRoleMaker(ours.UserDefinedRoleMaker, RoleMakerBase):
    """The role that the script says: one of the workers at these endpoints."""

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] | None = None) -> None:
        super().__init__(True, current_id=current_id, worker_endpoints=worker_endpoints or ())


class MPISymetricRoleMaker(RoleMakerBase):
    """Raises ConfigError: its ranks are half workers, half parameter servers."""

    def __init__(self) -> None:
        raise ConfigError(
            "MPISymetricRoleMaker: there are no parameter servers here; use PaddleCloudRoleMaker(is_collective=True)"
        )


class GeneralRoleMaker(RoleMakerBase):
    """Raises ConfigError: it is the role of a job with parameter servers."""

    def __init__(self, **kwargs: Any) -> None:
        raise ConfigError(
            "GeneralRoleMaker: there are no parameter servers here; use PaddleCloudRoleMaker(is_collective=True)"
        )


__all__ = [
    "GeneralRoleMaker", "MPISymetricRoleMaker", "PaddleCloudRoleMaker", "Role", "RoleMakerBase",
    "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker",
]  # fmt: skip
