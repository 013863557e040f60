"""Optimizers and learning-rate schedules."""

from polyreme.optimizer import lr
from polyreme.optimizer.adam import Adam, AdamW
from polyreme.optimizer.optimizer import Optimizer

__all__ = ["Adam", "AdamW", "Optimizer", "lr"]
