"""Mixtures of experts as PaddlePaddle writes them: gates, the layer, its clip and what counts tokens.

They compute with the ops that nn.MoE is made of; incubate.distributed.models.moe has them under their public paths.
"""

from polyreme.distributed.models.moe import utils
from polyreme.distributed.models.moe.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from polyreme.distributed.models.moe.layer import ClipGradForMOEByGlobalNorm, MoELayer

__all__ = ["BaseGate", "ClipGradForMOEByGlobalNorm", "GShardGate", "MoELayer", "NaiveGate", "SwitchGate", "utils"]
