"""Names under the path they have in PaddlePaddle's API."""

from polyreme.distributed.auto_parallel.layers.annotate import DistAttr
from polyreme.distributed.auto_parallel.tensors.dist_tensor import dtensor_from_fn, shard_tensor
from polyreme.distributed.auto_parallel.tensors.local_values import dtensor_from_local, dtensor_to_local
from polyreme.distributed.auto_parallel.tensors.reshard import reshard

__all__ = ["DistAttr", "dtensor_from_fn", "dtensor_from_local", "dtensor_to_local", "reshard", "shard_tensor"]
