"""fleet.utils: recompute, the sequence-parallel layers and layout changes, and files of this machine."""

from polyreme.distributed.fleet.local_fs import LocalFS
from polyreme.distributed.fleet.recompute import recompute
from polyreme.distributed.fleet.utils import sequence_parallel_utils

__all__ = ["LocalFS", "recompute", "sequence_parallel_utils"]
