"""LBFGS, optimizers around other optimizers, and averages of parameters."""

from polyreme.incubate.optimizer import functional
from polyreme.incubate.optimizer.averages import ExponentialMovingAverage, ModelAverage
from polyreme.incubate.optimizer.look_ahead import LookAhead
from polyreme.optimizer.lbfgs import LBFGS

__all__ = ["LBFGS", "ExponentialMovingAverage", "LookAhead", "ModelAverage", "functional"]
