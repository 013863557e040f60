"""UtilBase: small things that workers do together with values on the host.

A worker is a process; with one process each of these is what that process gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme.distributed.communication.collectives import barrier
from polyreme.distributed.communication.objects import all_gather_object
from polyreme.distributed.fleet.base.role_maker import PaddleCloudRoleMaker, RoleMakerBase
from polyreme.errors import ConfigError, did_you_mean

_JOIN: dict[str, Callable[..., Any]] = {"sum": np.sum, "min": np.min, "max": np.max}


class UtilBase:
    """`fleet.util`. comm_world is "worker" or "all", which is the same here: there are no servers."""

    role_maker: RoleMakerBase | PaddleCloudRoleMaker

    def __init__(self, role_maker: RoleMakerBase | None = None) -> None:
        self.role_maker = role_maker or PaddleCloudRoleMaker(is_collective=True)

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        """A number, nested list or ndarray joined over the workers ("sum", "min" or "max"): a number for a number, else
        an ndarray.
        """
        if mode not in _JOIN:
            raise ConfigError(f"util.all_reduce: mode={mode!r}{did_you_mean(mode, _JOIN)}")
        values = [np.asarray(v) for v in self.all_gather(input, comm_world)]
        if len({v.shape for v in values}) > 1:
            raise ConfigError(f"util.all_reduce: the workers gave shapes {[v.shape for v in values]}; give one shape")
        return _JOIN[mode](np.stack(values), 0)

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """Every worker's value, by rank."""
        _check_world("all_gather", comm_world)
        values: list[Any] = []
        all_gather_object(values, input)
        return values

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every worker is here."""
        _check_world("barrier", comm_world)
        barrier()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This worker's share of a list of files, which every worker must give in one order: neighbours stay together,
        and the first workers take one more where the numbers do not divide.
        """
        if not isinstance(files, list):
            raise TypeError(f"util.get_file_shard takes a list of file names, got {type(files).__name__}")
        number, index = self.role_maker.worker_num(), self.role_maker.worker_index()
        each, more = divmod(len(files), number)
        start = index * each + min(index, more)
        return files[start : start + each + (index < more)]

    def print_on_rank(self, message: Any, rank_id: int) -> None:
        """Print on one worker only."""
        if self.role_maker.worker_index() == rank_id:
            print(message)  # noqa: T201  # what it is for


def _check_world(what: str, comm_world: str) -> None:
    if comm_world not in ("worker", "all"):
        raise ConfigError(f"util.{what}: comm_world={comm_world!r}; there are workers only, give 'worker'")
