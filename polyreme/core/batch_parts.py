"""The devices that compute parts of one batch inside one program: the mesh axis that they lie along.

Under shard_map an op sees its device's part alone; one whose result is of the whole batch reduces over this axis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BatchParts(threading.local):
    """axis: None where a Tensor is global. sync_batch_norm: whether every batch norm uses the whole batch."""

    axis: str | None = None
    sync_batch_norm: bool = False

    @contextmanager
    def along(self, axis: str | None, sync_batch_norm: bool) -> Iterator[None]:
        """Code inside computes a part of a batch on each device along axis."""
        before = self.axis, self.sync_batch_norm
        self.axis, self.sync_batch_norm = axis, sync_batch_norm
        try:
            yield
        finally:
            self.axis, self.sync_batch_norm = before


batch_parts: BatchParts = BatchParts()
