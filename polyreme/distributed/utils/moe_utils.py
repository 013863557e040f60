"""Rows to the experts of other processes, and back."""

from polyreme.distributed.models.moe.exchange import global_gather, global_scatter

__all__ = ["global_gather", "global_scatter"]
