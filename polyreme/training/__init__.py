"""The training step: what it does with a batch, and how it computes."""

from polyreme.training.microbatches import Microbatch, cut, share_by_counts, shares
from polyreme.training.objective import Objective
from polyreme.training.policy import StepPolicy
from polyreme.training.precision import FULL_PRECISION, MixedPrecision
from polyreme.training.spikes import SpikePolicy
from polyreme.training.step import StepResult, TrainingStep

__all__ = [
    "FULL_PRECISION",
    "Microbatch",
    "MixedPrecision",
    "Objective",
    "SpikePolicy",
    "StepPolicy",
    "StepResult",
    "TrainingStep",
    "cut",
    "share_by_counts",
    "shares",
]
