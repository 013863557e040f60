"""polyreme.distributed.sharding: grouped parameter sharding."""

from polyreme.distributed.sharding.group_sharded import group_sharded_parallel, save_group_sharded_model

__all__ = ["group_sharded_parallel", "save_group_sharded_model"]
