"""fluid.contrib.reader: readers of jobs of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from polyreme.distributed.fleet.base.role_maker import PaddleCloudRoleMaker


def distributed_batch_reader(batch_reader: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[Any]]:
    """A reader of this process's part of the minibatches: of as many as there are workers, the one of its index.

    The launcher says how many there are. A last round in which some worker would have none is left out.
    """
    role = PaddleCloudRoleMaker(is_collective=True)

    def read() -> Iterator[Any]:
        batches = iter(batch_reader())
        while len(part := list(islice(batches, role.worker_num()))) == role.worker_num():
            yield part[role.worker_index()]

    return read


__all__ = ["distributed_batch_reader"]
