"""Checkpoints of sharded state: written whole or not at all, digested to the last bit, read back on any mesh."""

from polyreme.distributed.checkpoint.manifest import CheckpointVersionError, Manifest, config_hash
from polyreme.distributed.checkpoint.store import CheckpointStore, CheckpointWarning

__all__ = ["CheckpointStore", "CheckpointVersionError", "CheckpointWarning", "Manifest", "config_hash"]
