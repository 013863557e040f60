"""Attributes of PaddlePaddle's samplers that subclasses read."""

from __future__ import annotations


class BatchSamplerNames:
    """Attributes of BatchSampler."""

    _acc_steps = 1  # batches of a step that a worker puts in one
