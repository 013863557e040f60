"""Roles of 1.7 over those of polyreme.distributed.fleet: every process is a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.distributed.fleet.base import role_maker as ours
from polyreme.distributed.fleet.base.role_maker import Role, RoleMakerBase
from polyreme.errors import ConfigError


class _GeneratedRole:
    """What 1.7 asks of a role besides."""

    def generate_role(self) -> None:
        """Nothing is left to do: the role is known when it is made."""

    def get_trainer_endpoints(self: Any) -> list[str]:
        """host:port of every worker."""
        return self.worker_endpoints()

    def get_pserver_endpoints(self: Any) -> list[str]:
        """host:port of every parameter server."""
        return self.server_endpoints()


class PaddleCloudRoleMaker(_GeneratedRole, ours.PaddleCloudRoleMaker):
    """The role that a launcher left in the environment."""

    def __init__(self, is_collective: bool = False) -> None:
        super().__init__(is_collective)


class UserDefinedRoleMaker(_GeneratedRole, ours.UserDefinedRoleMaker):
    """The role that the script says: one of worker_num workers, or a parameter server, which fleet refuses."""

    def __init__(
        self, current_id: int = 0, role: int = Role.WORKER, worker_num: int = 0,
        server_endpoints: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            current_id=current_id, role=role, worker_num=worker_num or 1, server_endpoints=server_endpoints or ()
        )


class UserDefinedCollectiveRoleMaker(_GeneratedRole, ours.UserDefinedRoleMaker):
    """The role that the script says: one of the workers at these endpoints."""

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] | None = None) -> None:
        super().__init__(True, current_id=current_id, worker_endpoints=worker_endpoints or ())


class MPISymetricRoleMaker:
    """Raises ConfigError: its ranks are half workers, half parameter servers."""

    def __init__(self) -> None:
        raise ConfigError(
            "MPISymetricRoleMaker: there are no parameter servers here; use PaddleCloudRoleMaker(is_collective=True)"
        )


class GeneralRoleMaker:
    """Raises ConfigError: it is the role of a job with parameter servers."""

    def __init__(self, **kwargs: Any) -> None:
        raise ConfigError(
            "GeneralRoleMaker: there are no parameter servers here; use PaddleCloudRoleMaker(is_collective=True)"
        )


__all__ = [
    "GeneralRoleMaker", "MPISymetricRoleMaker", "PaddleCloudRoleMaker", "Role", "RoleMakerBase",
    "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker",
]  # fmt: skip
