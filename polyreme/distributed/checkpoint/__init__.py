"""Checkpoints of sharded state: written whole or not at all, digested to the last bit, read back on any mesh."""

from polyreme.distributed.checkpoint.conversion import ConversionRules
from polyreme.distributed.checkpoint.manifest import CheckpointVersionError, Manifest, config_hash
from polyreme.distributed.checkpoint.sharded_weight import (
    ShardedStateDict,
    ShardedWeight,
    build_sharded_state_dict,
    shard_weight,
)
from polyreme.distributed.checkpoint.state_dict import load_merged_state_dict, load_state_dict, save_state_dict
from polyreme.distributed.checkpoint.store import CheckpointStore, CheckpointWarning

__all__ = [
    "CheckpointStore",
    "CheckpointVersionError",
    "CheckpointWarning",
    "ConversionRules",
    "Manifest",
    "ShardedStateDict",
    "ShardedWeight",
    "build_sharded_state_dict",
    "config_hash",
    "load_merged_state_dict",
    "load_state_dict",
    "save_state_dict",
    "shard_weight",
]
