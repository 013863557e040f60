"""Optimizers and learning-rate schedules."""

from polyreme.optimizer import lr
from polyreme.optimizer.adam import Adam, Adamax, AdamW
from polyreme.optimizer.adaptive import Adadelta, Adagrad, RMSProp
from polyreme.optimizer.lamb import Lamb
from polyreme.optimizer.optimizer import Optimizer
from polyreme.optimizer.sgd import SGD, Momentum

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lamb", "Momentum", "Optimizer", "RMSProp", "lr"]
