"""fleet.utils: recompute, and the sequence-parallel layers and layout changes."""

from polyreme.distributed.fleet.recompute import recompute
from polyreme.distributed.fleet.utils import sequence_parallel_utils

__all__ = ["recompute", "sequence_parallel_utils"]
