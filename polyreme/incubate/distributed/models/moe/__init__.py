"""Mixtures of experts with PaddlePaddle's gates."""

from polyreme.incubate.distributed.models.moe import utils

__all__ = ["utils"]
