"""Mixtures of experts with PaddlePaddle's gates."""

from polyreme.distributed.models.moe import (
    BaseGate,
    ClipGradForMOEByGlobalNorm,
    GShardGate,
    MoELayer,
    NaiveGate,
    SwitchGate,
)
from polyreme.incubate.distributed.models.moe import utils

ClipGradByGlobalNorm = ClipGradForMOEByGlobalNorm
"""PaddlePaddle's other name of it."""

__all__ = [
    "BaseGate",
    "ClipGradByGlobalNorm",
    "ClipGradForMOEByGlobalNorm",
    "GShardGate",
    "MoELayer",
    "NaiveGate",
    "SwitchGate",
    "utils",
]
