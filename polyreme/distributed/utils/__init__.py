"""Functions that programs over several processes call, under their public paths."""

from polyreme.distributed.utils import moe_utils
from polyreme.distributed.utils.moe_utils import global_gather, global_scatter

__all__ = ["global_gather", "global_scatter", "moe_utils"]
